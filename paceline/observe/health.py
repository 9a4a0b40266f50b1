"""Warnings about a run that does not learn although nothing fails and its metrics look normal."""

import logging

log = logging.getLogger(__name__)

# The result of every other alarm, so it is reported only if no other alarm is.
CONSEQUENCE = "train/weights_changed"
# Metric, the value that is wrong, and what it means.
ALARMS: tuple[tuple[str, float, str], ...] = (
    (
        "train/lr",
        0.0,
        "the learning rate is 0, so the model does not learn; set train.learning_rate above 0 and "
        "check train.lr_schedule",
    ),
    (
        "train/advantage_zero_fraction",
        1.0,
        "every token has advantage 0: all completions of each prompt got the same reward. The task "
        "is too easy or too hard for the model, or the reward is constant; check reward/mean and "
        "the samples (paceline samples), or set algorithm.dynamic_sampling = true",
    ),
    (
        "train/masked_fraction",
        1.0,
        "the off-policy correction masked every token: the log-probs of trainer and engine do not "
        "match; check train/logprob_diff_max for fresh tokens; for stale ones widen "
        "correction_range or reject_range, or lower max_staleness",
    ),
    (
        CONSEQUENCE,
        0.0,
        "the step changed no weight; check train/grad_norm (0: no token had an advantage; nan: the "
        "gradient is not finite), train/updates_skipped and train.learning_rate (an update far "
        "smaller than the weight is lost in rounding)",
    ),
)


class Health:
    """Monitor that warns at the first, 10th, 100th, ... step with a wrong value.

    A single wrong step after a good one is ignored: near the end of a task all completions may be
    correct by chance.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._before: set[str] | None = None  # alarms of the previous step, None if there is none

    def check(self, metrics: dict[str, float], step: int) -> None:
        found = [alarm for alarm in ALARMS if metrics.get(alarm[0]) == alarm[1]]
        names = {name for name, _, _ in found}
        new = set() if self._before is None else names - self._before
        self._before = names
        for name, wrong, meaning in found:
            if name in new or (name == CONSEQUENCE and len(found) > 1):
                continue
            count = self._counts[name] = self._counts.get(name, 0) + 1
            if str(count).strip("0") == "1":
                log.warning(
                    "step %d: %s (%s = %g, in %d step(s) so far)",
                    step + 1,
                    meaning,
                    name,
                    wrong,
                    count,
                )
