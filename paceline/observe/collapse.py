"""Warning when the policy collapses, with the metrics that changed while the reward fell."""

import logging
from collections import deque
from math import inf, isfinite, nan
from statistics import fmean, stdev

log = logging.getLogger(__name__)

REWARD = "reward/mean"
# A policy that changes too fast shows in one of these. A fall of the reward without a change of
# them has another cause, for example harder prompts.
SIGNS = ("train/entropy", "train/ratio_max", "train/staleness_kl", "train/grad_norm")
WINDOW = 25  # steps of each mean: rewards of single batches are noisy
LAST = 5  # steps of the first mean, and of a fast collapse, which ends a run within a window
LOST = 0.3  # fraction of the reward gained since the first mean
NOISE = 2.0  # standard deviations of a step's reward that a fall exceeds
FACTOR = 2.0  # change of a sign
ADVICE = (
    "Lower train.learning_rate or schedule.max_staleness, or set train.staleness_kl_target to 0.01 "
    "or less (0 is off), and continue from a checkpoint before the fall"
)


class CollapseMonitor:
    """Monitor that warns once per collapse: a fall from the best reward with changed signs."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self._first = nan
        self._best: dict[str, float] = {}
        self._best_step, self._spread = 0, inf
        self._warned = False

    def check(self, metrics: dict[str, float], step: int) -> None:
        """Log a warning if the policy has collapsed since the step with the best reward."""
        # A skipped update has numbers that are not finite; the policy stays as it was.
        kept = {
            name: value for name in (REWARD, *SIGNS) if isfinite(value := metrics.get(name, nan))
        }
        if REWARD not in kept:
            return
        self._steps.append(kept)
        if len(self._steps) < LAST:
            return
        mean, full = self._mean(WINDOW), len(self._steps) == WINDOW
        if not self._best:
            self._first = mean[REWARD]
        if not self._best or mean[REWARD] >= self._best[REWARD]:
            self._best, self._best_step, self._warned = mean, step + 1, False
            self._spread = self._deviation() if full else inf
            return
        lost = self._best[REWARD] - mean[REWARD] > LOST * (self._best[REWARD] - self._first)
        if full and lost and not self._warned and (found := self.changes(WINDOW)):
            self._warned = True
            log.warning("step %d: %s. %s", step + 1, found, ADVICE)

    def changes(self, steps: int = LAST) -> str:
        """Return how the last steps differ from the best; empty if the policy looks as usual."""
        if not self._best:
            return ""
        now = self._mean(steps)
        # A fall itself spreads the rewards, so the smaller deviation is that of the noise.
        noise = NOISE * min(self._spread, self._deviation())
        if self._best[REWARD] - now[REWARD] <= noise:
            return ""
        signs = [
            f"{name} {self._best[name]:.3g} -> {now[name]:.3g}"
            for name in SIGNS
            if name in now and name in self._best and _differs(self._best[name], now[name])
        ]
        if not signs:
            return ""
        return (
            f"the policy collapsed: the mean reward fell from {self._best[REWARD]:.3g} at step "
            f"{self._best_step} to {now[REWARD]:.3g}, with {', '.join(signs)}"
        )

    def _deviation(self) -> float:
        return stdev(step[REWARD] for step in self._steps)

    def _mean(self, count: int) -> dict[str, float]:
        """Return the means of the last `count` steps."""
        last = list(self._steps)[-count:]
        names = {name for step in last for name in step}
        return {name: fmean(step[name] for step in last if name in step) for name in names}


def _differs(before: float, now: float) -> bool:
    return not before / FACTOR <= now <= before * FACTOR
