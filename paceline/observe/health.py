"""Says loudly when a run goes on without learning: nothing crashes then, and the figures look almost normal."""

import logging

log = logging.getLogger(__name__)

CONSEQUENCE = "train/weights_changed"  # of all others: told only where none of them is
ALARMS: tuple[
    tuple[str, float, str], ...
] = (  # metric, the value that is wrong, what it means and what to do
    (
        "train/lr",
        0.0,
        "the learning rate is 0, so nothing is learned; set train.learning_rate above 0 and look at train.lr_schedule",
    ),
    (
        "train/advantage_zero_fraction",
        1.0,
        "every token has advantage 0: all attempts at each prompt got the same reward. The task is too easy or too hard for the model, "
        "or the reward is constant; look at reward/mean and the answers, or set algorithm.dynamic_sampling = true",
    ),
    (
        "train/masked_fraction",
        1.0,
        "the off-policy correction left no token to learn from: the trainer's log-probs and the engine's do not belong together; look "
        "at train/logprob_diff_max for fresh tokens, and widen correction_range or reject_range or lower max_staleness for stale ones",
    ),
    (
        CONSEQUENCE,
        0.0,
        "the step changed no weight; look at train/grad_norm (0: no token had an advantage; nan: the gradient is not finite), at "
        "train/updates_skipped, and at train.learning_rate (an update far smaller than the weight is lost in rounding)",
    ),
)


class Health:
    """Warns the first time something is wrong, and again at the 10th, 100th, 1000th ... step at which it is. One step between good ones
    is no reason: near the end of a task all answers may be right by chance."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._before: set[str] | None = (
            None  # what was wrong with the step before; None: there was none
        )

    def check(self, metrics: dict[str, float], step: int) -> None:
        found = [alarm for alarm in ALARMS if metrics.get(alarm[0]) == alarm[1]]
        alone = set() if self._before is None else {name for name, _, _ in found} - self._before
        self._before = {name for name, _, _ in found}
        for name, wrong, meaning in found:
            if name in alone or (name == CONSEQUENCE and len(found) > 1):
                continue
            count = self._seen[name] = self._seen.get(name, 0) + 1
            if str(count).strip("0") == "1":
                log.warning(
                    "step %d: %s (%s = %g, in %d step(s) so far)",
                    step + 1,
                    meaning,
                    name,
                    wrong,
                    count,
                )
