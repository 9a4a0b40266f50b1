"""Collapse monitor: it names a collapse with the metrics that changed, and nothing else."""

import logging
import math
import random

import pytest

from paceline.errors import MismatchError
from paceline.observe.collapse import CollapseMonitor
from paceline.observe.mismatch import MismatchMonitor


def step(reward: float, entropy: float = 0.2, grad_norm: float = 1.0) -> dict[str, float]:
    return {
        "reward/mean": reward,
        "train/entropy": entropy,
        "train/ratio_max": 3.0,
        "train/staleness_kl": 0.01,
        "train/grad_norm": grad_norm,
    }


def learn(monitor: CollapseMonitor, steps: int = 100) -> None:
    """Report steps with a noisy reward that rises from 0.3 to 0.9."""
    noise = random.Random(0)
    for number in range(steps):
        rising = 0.3 + 0.6 * min(1.0, number / 60)
        monitor.check(step(rising + noise.uniform(-0.05, 0.05)), number)


def test_monitor_warns_once_when_reward_falls_with_changed_entropy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = CollapseMonitor()
    learn(monitor)
    assert not caplog.records
    for number in range(100, 160):
        monitor.check(step(0.2, entropy=1.5), number)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "the policy collapsed: the mean reward fell from 0.9" in caplog.text
    assert "train/entropy 0.2 -> 0." in caplog.text and "train.learning_rate" in caplog.text
    assert "train/grad_norm" not in caplog.text  # it did not change


def test_monitor_warns_again_when_reward_recovers_in_between(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = CollapseMonitor()
    learn(monitor)
    for number, reward in enumerate([0.2] * 30 + [0.99] * 40 + [0.2] * 30):
        monitor.check(step(reward, grad_norm=1.0 if reward > 0.5 else 20.0), 100 + number)
    assert len(caplog.records) == 2


def test_monitor_is_silent_when_reward_falls_without_change_of_policy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = CollapseMonitor()
    learn(monitor)
    for number in range(100, 160):
        monitor.check(step(0.2), number)
    assert not caplog.records


def test_monitor_ignores_metrics_of_skipped_update(caplog: pytest.LogCaptureFixture) -> None:
    monitor = CollapseMonitor()
    learn(monitor)
    monitor.check(step(0.99, grad_norm=math.nan), 100)
    for number in range(101, 160):
        monitor.check(step(0.2), number)
    monitor.check(step(0.2, entropy=math.inf), 160)
    assert monitor.changes() == "" and not caplog.records


def test_monitor_is_silent_when_run_does_not_learn(caplog: pytest.LogCaptureFixture) -> None:
    monitor, noise = CollapseMonitor(), random.Random(0)
    for number in range(500):
        entropy = 1.0 if number < 250 else 0.1
        monitor.check(step(0.1 + noise.uniform(-0.05, 0.05), entropy), number)
    assert not caplog.records


def test_monitor_warns_when_first_updates_destroy_policy(caplog: pytest.LogCaptureFixture) -> None:
    monitor = CollapseMonitor()
    for number, reward in enumerate([0.33, 0.31, 0.3, 0.1] + [0.02] * 30):
        monitor.check(step(reward, entropy=1.0 if number < 4 else 5.0), number)
    assert len(caplog.records) == 1 and "train/entropy" in caplog.text


def test_monitor_ignores_step_without_reward_or_update() -> None:
    monitor = CollapseMonitor()
    for number in range(50):
        monitor.check({} if number % 2 else {"reward/mean": 0.5}, number)
    assert monitor.changes() == ""


def test_mismatch_is_reported_as_collapse_when_policy_has_collapsed() -> None:
    collapse = CollapseMonitor()
    mismatch = MismatchMonitor(0.02, collapse)
    jump = {"train/tokens": 1000.0, "train/stale_fraction": 1.0, "train/staleness_diff_mean": 9.0}
    learn(collapse)
    with pytest.raises(MismatchError, match="the engine has wrong weights"):
        mismatch.check(jump | step(0.0, grad_norm=50.0), 100)
    for number in range(100, 110):
        collapse.check(step(0.1, grad_norm=50.0), number)
    with pytest.raises(MismatchError, match=r"step 111: .* the policy collapsed") as found:
        mismatch.check(jump, 110)
    assert "wrong weights" not in str(found.value)
