"""Steps that took more than twice the median, and which of their parts took longer."""

import logging
import statistics
from collections import Counter, deque
from collections.abc import Mapping

log = logging.getLogger(__name__)

PARTS = {
    "time/wait_s": "waiting for groups to be generated and scored",
    "time/train_s": "the train step",
    "time/sync_s": "bringing the weights to the engines",
    "time/evaluate_s": "the evaluation",
    "time/save_s": "the checkpoint after the step before",
}
SLOW = 2.0  # times the median
LAST = 100  # steps that the medians are taken of
FEWEST = 5  # steps before which there is no median


class SlowSteps:
    """Observer of step times. `causes` counts the slow steps by the part that took longer."""

    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()
        self._last: deque[dict[str, float]] = deque(maxlen=LAST)

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = {name: metrics.get(name, 0.0) for name in PARTS}
        if len(self._last) >= FEWEST:
            usual = statistics.median(sum(before.values()) for before in self._last)
            if sum(parts.values()) > SLOW * usual:
                self._report(step, parts, usual)
        self._last.append(parts)

    def _report(self, step: int, parts: dict[str, float], usual: float) -> None:
        longer = {
            name: seconds - statistics.median(before[name] for before in self._last)
            for name, seconds in parts.items()
        }
        cause = max(longer, key=lambda name: longer[name])
        self.causes[cause] += 1
        log.info(
            "step %d took %.2f s, more than twice the median of %.2f s: %.2f s more for %s (%s)",
            step,
            sum(parts.values()),
            usual,
            longer[cause],
            PARTS[cause],
            cause,
        )
