"""The alarm that stops a run whose engine has not the trainer's weights, and nothing else."""

import logging
import math

import pytest

from paceline.errors import MismatchError
from paceline.observe.mismatch import MismatchMonitor


def batch(
    gap: float | None = None, stale_gap: float | None = None, tokens: int = 1000
) -> dict[str, float]:
    found: dict[str, float] = {
        "train/tokens": float(tokens),
        "train/stale_fraction": 0.0 if stale_gap is None else 1.0 if gap is None else 0.5,
    }
    if gap is not None:
        found |= {
            "train/logprob_diff_mean": gap,
            "train/logprob_diff_max": 3 * gap,
            "train/mismatch_kl": gap**2,
        }
    if stale_gap is not None:
        found["train/staleness_diff_mean"] = stale_gap
    return found


def test_two_implementations_of_one_policy_may_differ_up_to_the_limit() -> None:
    monitor = MismatchMonitor(0.02)
    monitor.check(batch(1e-6), 0)
    monitor.check(batch(0.019), 1)
    with pytest.raises(
        MismatchError,
        match=r"step 3: .* differ by 0\.05 in the mean \(sync\.mismatch_limit = 0\.02\)",
    ):
        monitor.check(batch(0.05), 2)


def test_a_distance_that_is_no_number_is_wrong() -> None:
    with pytest.raises(MismatchError):
        MismatchMonitor(0.02).check(batch(math.nan), 0)


def test_a_handful_of_tokens_proves_nothing() -> None:
    monitor = MismatchMonitor(0.02)
    monitor.check(batch(0.5, tokens=8), 0)
    with pytest.raises(MismatchError, match="step 2"):  # many do
        monitor.check(batch(0.5), 1)


def test_stale_tokens_differ_because_the_policy_moved_and_only_a_jump_far_beyond_that_is_wrong() -> (
    None
):
    monitor = MismatchMonitor(0.02)
    for step in range(1, 6):
        monitor.check(batch(stale_gap=0.1 * step), step)
    with pytest.raises(MismatchError, match=r"over tokens of older versions, where 0\.3 is usual"):
        monitor.check(batch(stale_gap=3.5), 6)


def test_when_all_tokens_are_stale_it_says_once_that_it_sees_less(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = MismatchMonitor(0.02)
    with caplog.at_level(logging.INFO):
        for step in range(3):
            monitor.check(batch(stale_gap=0.1), step)
    assert (
        sum("can only be compared loosely" in record.getMessage() for record in caplog.records) == 1
    )


def test_a_step_that_did_not_train_the_actor_is_not_judged() -> None:
    monitor = MismatchMonitor(0.02)
    monitor.check({"critic/loss": 1.0}, 0)
    with pytest.raises(MismatchError, match="step 2"):  # the next one is
        monitor.check(batch(0.5), 1)
