"""Mismatch monitor: it ends a run only when the engine does not have the trainer's weights."""

import logging
import math

import pytest

from paceline.errors import MismatchError
from paceline.observe.mismatch import MismatchMonitor


def batch(
    diff: float | None = None, stale_diff: float | None = None, tokens: int = 1000
) -> dict[str, float]:
    found: dict[str, float] = {
        "train/tokens": float(tokens),
        "train/stale_fraction": 0.0 if stale_diff is None else 1.0 if diff is None else 0.5,
    }
    if diff is not None:
        found |= {
            "train/logprob_diff_mean": diff,
            "train/logprob_diff_max": 3 * diff,
            "train/mismatch_kl": diff**2,
        }
    if stale_diff is not None:
        found["train/staleness_diff_mean"] = stale_diff
    return found


def test_monitor_raises_when_fresh_difference_exceeds_limit() -> None:
    monitor = MismatchMonitor(0.02)
    monitor.check(batch(1e-6), 0)
    monitor.check(batch(0.019), 1)
    with pytest.raises(
        MismatchError,
        match=r"step 3: .* differ by 0\.05 on average \(sync\.mismatch_limit = 0\.02\)",
    ):
        monitor.check(batch(0.05), 2)


def test_monitor_raises_when_difference_is_nan() -> None:
    with pytest.raises(MismatchError):
        MismatchMonitor(0.02).check(batch(math.nan), 0)


def test_monitor_ignores_difference_of_few_tokens() -> None:
    monitor = MismatchMonitor(0.02)
    monitor.check(batch(0.5, tokens=8), 0)
    with pytest.raises(MismatchError, match="step 2"):  # many tokens suffice
        monitor.check(batch(0.5), 1)


def test_monitor_raises_when_stale_difference_jumps() -> None:
    monitor = MismatchMonitor(0.02)
    for step in range(1, 6):
        monitor.check(batch(stale_diff=0.1 * step), step)
    with pytest.raises(MismatchError, match=r"over tokens of older versions, where 0\.3 is usual"):
        monitor.check(batch(stale_diff=3.5), 6)


def test_monitor_logs_once_when_all_tokens_are_stale(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = MismatchMonitor(0.02)
    with caplog.at_level(logging.INFO):
        for step in range(3):
            monitor.check(batch(stale_diff=0.1), step)
    messages = [record.getMessage() for record in caplog.records]
    assert sum("only a large difference" in message for message in messages) == 1


def test_monitor_ignores_step_without_actor_update() -> None:
    monitor = MismatchMonitor(0.02)
    monitor.check({"critic/loss": 1.0}, 0)
    with pytest.raises(MismatchError, match="step 2"):  # the next step has one
        monitor.check(batch(0.5), 1)
