"""Watches whether engine and trainer are the same policy: what the engine says of its tokens against what the trainer says of them.

For tokens of the trainer's own version any distance is one of two implementations, or of wrong weights, so a limit on its mean is a
sharp alarm. Older tokens differ because the policy has moved, so for them only a jump far beyond what is usual is one.
"""

import logging
import math
import statistics
from collections import deque

from paceline.errors import MismatchError

log = logging.getLogger(__name__)

FEWEST = 32  # tokens of the trainer's version a mean is taken of
STALE_LIMIT, STALE_FACTOR = (
    2.0,
    10.0,
)  # for older tokens: a distance above both, and so many times the usual one
REMEMBERED = 20  # steps the usual distance is of


class MismatchMonitor:
    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._stale: deque[float] = deque(maxlen=REMEMBERED)
        self._said = False

    def check(self, metrics: dict[str, float], step: int) -> None:
        """Raises MismatchError when the engine cannot have had the weights it says it had."""
        gap, stale_gap = (
            metrics.get("train/logprob_diff_mean"),
            metrics.get("train/staleness_diff_mean"),
        )
        fresh = metrics.get("train/tokens", 0.0) * (1 - metrics.get("train/stale_fraction", 0.0))
        if gap is not None and fresh >= FEWEST and not gap <= self._limit:
            most, kl = (
                metrics.get("train/logprob_diff_max", math.nan),
                metrics.get("train/mismatch_kl", math.nan),
            )
            raise MismatchError(
                f"step {step + 1}: engine and trainer do not have the same weights: of {fresh:.0f} tokens sampled with version {step}, the "
                f"trainer's own, log-probs differ by {gap:.3g} in the mean (sync.mismatch_limit = {self._limit:g}), {most:.3g} at most, "
                f"KL {kl:.3g}. A tensor was lost or mislaid on the way to the engine, or the two compute differently (temperature, dtype)"
            )
        if stale_gap is None:
            return
        usual = statistics.median(self._stale) if self._stale else gap or 0.0
        if not stale_gap <= max(STALE_LIMIT, STALE_FACTOR * usual):
            raise MismatchError(
                f"step {step + 1}: log-probs of engine and trainer differ by {stale_gap:.3g} in the mean over tokens of older versions, "
                f"where {usual:.3g} is usual: the engine has wrong weights, or the policy has been thrown far off (look at train/grad_norm)"
            )
        self._stale.append(stale_gap)
        if gap is None and not self._said:
            self._said = True
            log.info(
                "step %d: no token of this batch was sampled with the trainer's own version, so engine and trainer can only be compared "
                "loosely (mean distance of log-probs %.3g; above %g the run ends)",
                step + 1,
                stale_gap,
                max(STALE_LIMIT, STALE_FACTOR * usual),
            )
