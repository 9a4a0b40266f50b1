"""Warnings about spikes of loss and gradient, and about a policy that drifts without learning.

A gradient or loss far above the usual is reported at once. Lower entropy and other lengths are
normal while the reward rises, so they are reported only if it does not.
"""

import logging
import math
from collections import deque
from statistics import fmean, median

log = logging.getLogger(__name__)

WINDOW = 25  # steps of the usual value, and of each mean
SPIKE, ABOVE = 10.0, 2.0  # multiples of median and maximum of the last steps
MIN_SPIKE = {"train/grad_norm": 1.0, "train/loss": 1.0}  # smaller values are never a spike
FACTOR = 3.0  # change of a mean since the first steps
REWARD, ENTROPY, LENGTH = "reward/mean", "train/entropy", "rollout/row_tokens"
SPIKED = (
    "a batch is unusual, or the last update was too large; check the samples of this step, and "
    "lower train.learning_rate or train.max_grad_norm if it repeats"
)
DRIFTED = {
    (ENTROPY, False): "the policy becomes deterministic without a better reward: lower "
    "train.learning_rate, or raise algorithm.entropy_coef or rollout.temperature",
    (ENTROPY, True): "the policy becomes random: lower train.learning_rate or "
    "schedule.max_staleness, or lower algorithm.entropy_coef",
    (LENGTH, False): "completions become short without a better reward: the reward or the "
    "aggregation may favor short ones; check the samples (paceline samples)",
    (LENGTH, True): "completions become long without a better reward: the reward or the "
    "aggregation may favor long ones; check the samples (paceline samples) and algorithm.overlong",
}


class DriftMonitor:
    """Monitor that warns about the first, 10th, 100th, ... spike or drift of each metric."""

    def __init__(self) -> None:
        self._last: dict[str, deque[float]] = {}
        self._first: dict[str, float] = {}  # means of the first steps
        self._warned: set[str] = set()  # drifts and spikes that last
        self._counts: dict[str, int] = {}

    def check(self, metrics: dict[str, float], step: int) -> None:
        # Those of a skipped update are reported elsewhere, and have no mean.
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for name, least in MIN_SPIKE.items():
            if name in metrics:
                self._check_spike(name, abs(metrics[name]), least, step)
        for name in (REWARD, ENTROPY, LENGTH):
            if name in metrics:
                self._keep(name, metrics[name])
        for name in (ENTROPY, LENGTH):
            if name in metrics and REWARD in metrics:
                self._check_drift(name, step)

    def _check_spike(self, name: str, value: float, least: float, step: int) -> None:
        last = self._last.get(name, ())
        usual, largest = (median(last), max(last)) if len(last) == WINDOW else (math.inf, math.inf)
        # A task that is solved has no gradient most of the time.
        found = usual > 0 and value > max(least, SPIKE * usual, ABOVE * largest)
        message = f"{name} = {value:.3g}, where {usual:.3g} is usual: {SPIKED}"
        self._warn(name, found, found, message, step)
        self._keep(name, value)

    def _check_drift(self, name: str, step: int) -> None:
        if name not in self._first or len(self._last[name]) < WINDOW:
            return
        before, now = self._first[name], fmean(self._last[name])
        better = fmean(self._last[REWARD]) > self._first[REWARD]
        rose = now > before
        changed = now > FACTOR * before if rose else now * FACTOR < before
        message = f"{name} {before:.3g} -> {now:.3g}: {DRIFTED[name, rose]}"
        self._warn(name, changed, changed and not better, message, step)

    def _warn(self, name: str, lasts: bool, found: bool, message: str, step: int) -> None:
        if not lasts:
            self._warned.discard(name)
        elif found and name not in self._warned:
            self._warned.add(name)
            count = self._counts[name] = self._counts.get(name, 0) + 1
            if str(count).strip("0") == "1":
                log.warning("step %d: %s (%d time(s) so far)", step + 1, message, count)

    def _keep(self, name: str, value: float) -> None:
        last = self._last.setdefault(name, deque(maxlen=WINDOW))
        last.append(value)
        if name not in self._first and len(last) == WINDOW:
            self._first[name] = fmean(last)
