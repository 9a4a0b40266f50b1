"""A run that does not learn says so, but not at every step."""

import logging

import pytest

from paceline.observe.health import ALARMS, Health


@pytest.mark.parametrize(("metric", "wrong"), [(name, wrong) for name, wrong, _ in ALARMS])
def test_what_is_wrong_is_said_at_the_first_tenth_and_hundredth_step(
    metric: str, wrong: float, caplog: pytest.LogCaptureFixture
) -> None:
    health = Health()
    for step in range(120):
        health.check({metric: wrong}, step)
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [
        1,
        10,
        100,
    ]
    assert all(
        record.levelno == logging.WARNING and metric in record.getMessage()
        for record in caplog.records
    )


def test_a_run_that_learns_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    metrics = {
        "train/lr": 1e-6,
        "train/weights_changed": 1.0,
        "train/advantage_zero_fraction": 0.9,
        "train/masked_fraction": 0.0,
    }
    Health().check(metrics, 0)
    Health().check({}, 0)
    assert not caplog.records


def test_one_cause_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    Health().check({"train/weights_changed": 0.0, "train/advantage_zero_fraction": 1.0}, 0)
    assert len(caplog.records) == 1 and "every token has advantage 0" in caplog.text


def test_a_single_step_between_good_ones_is_no_reason_to_warn_but_two_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health = Health()
    for step, share in enumerate([0.5, 1.0, 0.5, 1.0]):
        health.check({"train/advantage_zero_fraction": share}, step)
    assert not caplog.records
    health.check({"train/advantage_zero_fraction": 1.0}, 4)
    assert len(caplog.records) == 1
