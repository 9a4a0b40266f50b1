"""Check that engine and trainer have the same weights, by comparing their log-probs.

For tokens sampled with the trainer's current version, only implementation differences or wrong
weights can separate the two, so a limit on the mean difference is a sharp test. Log-probs of stale
tokens also differ because the policy has changed, so for them only a large jump is an error, and a
policy that collapses is reported as that.
"""

import logging
import math
import statistics
from collections import deque

from paceline.errors import MismatchError
from paceline.observe.collapse import ADVICE, CollapseMonitor

log = logging.getLogger(__name__)

MIN_TOKENS = 32  # fresh tokens that make a mean reliable
# The difference of stale tokens is an error above both this value and this multiple of the usual.
STALE_LIMIT, STALE_FACTOR = 2.0, 10.0
HISTORY = 20  # steps whose median is the usual difference


class MismatchMonitor:
    """Monitor that ends the run if the engine's weights are not the trainer's."""

    def __init__(self, limit: float, collapse: CollapseMonitor | None = None) -> None:
        self._limit, self._collapse = limit, collapse
        self._stale: deque[float] = deque(maxlen=HISTORY)
        self._logged = False

    def check(self, metrics: dict[str, float], step: int) -> None:
        """Raise MismatchError if the engine cannot have used the weights of its version."""
        diff = metrics.get("train/logprob_diff_mean")
        stale_diff = metrics.get("train/staleness_diff_mean")
        fresh = metrics.get("train/tokens", 0.0) * (1 - metrics.get("train/stale_fraction", 0.0))
        if diff is not None and fresh >= MIN_TOKENS and not diff <= self._limit:
            largest = metrics.get("train/logprob_diff_max", math.nan)
            kl = metrics.get("train/mismatch_kl", math.nan)
            raise MismatchError(
                f"step {step + 1}: engine and trainer do not have the same weights: the log-probs "
                f"of {fresh:.0f} tokens sampled with the trainer's version {step} differ by "
                f"{diff:.3g} on average (sync.mismatch_limit = {self._limit:g}), by at most "
                f"{largest:.3g}, KL {kl:.3g}. Either the weight sync lost or misplaced a tensor, "
                f"or the two compute differently (temperature, dtype)"
            )
        if stale_diff is None:
            return
        usual = statistics.median(self._stale) if self._stale else diff or 0.0
        limit = max(STALE_LIMIT, STALE_FACTOR * usual)
        if not stale_diff <= limit:
            problem = (
                f"step {step + 1}: log-probs of engine and trainer differ by {stale_diff:.3g} on "
                f"average over tokens of older versions, where {usual:.3g} is usual"
            )
            if self._collapse and (changes := self._collapse.changes()):
                raise MismatchError(f"{problem}: {changes}. {ADVICE}")
            raise MismatchError(
                f"{problem}: the engine has wrong weights, or an update changed the policy too "
                f"much (check train/grad_norm)"
            )
        self._stale.append(stale_diff)
        if diff is None and not self._logged:
            self._logged = True
            log.info(
                "step %d: no token of this batch was sampled with the trainer's version, so only a "
                "large difference between engine and trainer is detected (mean difference of "
                "log-probs %.3g; above %g the run ends)",
                step + 1,
                stale_diff,
                limit,
            )
