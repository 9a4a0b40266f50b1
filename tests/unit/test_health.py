"""Warnings about runs that do not learn, but not at every step."""

import logging

import pytest

from paceline.observe.health import ALARMS, Health


@pytest.mark.parametrize(("metric", "wrong"), [(name, wrong) for name, wrong, _ in ALARMS])
def test_health_warns_at_first_tenth_and_hundredth_occurrence(
    metric: str, wrong: float, caplog: pytest.LogCaptureFixture
) -> None:
    health = Health()
    for step in range(120):
        health.check({metric: wrong}, step)
    steps = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert steps == [1, 10, 100]
    for record in caplog.records:
        assert record.levelno == logging.WARNING and metric in record.getMessage()


def test_health_is_silent_when_run_learns(caplog: pytest.LogCaptureFixture) -> None:
    metrics = {
        "train/lr": 1e-6,
        "train/weights_changed": 1.0,
        "train/advantage_zero_fraction": 0.9,
        "train/masked_fraction": 0.0,
    }
    Health().check(metrics, 0)
    Health().check({}, 0)
    assert not caplog.records


def test_health_reports_only_cause_when_weights_do_not_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Health().check({"train/weights_changed": 0.0, "train/advantage_zero_fraction": 1.0}, 0)
    assert len(caplog.records) == 1 and "every token has advantage 0" in caplog.text


def test_health_warns_when_two_consecutive_steps_are_bad(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health = Health()
    for step, fraction in enumerate([0.5, 1.0, 0.5, 1.0]):
        health.check({"train/advantage_zero_fraction": fraction}, step)
    assert not caplog.records
    health.check({"train/advantage_zero_fraction": 1.0}, 4)
    assert len(caplog.records) == 1
