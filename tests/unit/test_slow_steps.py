"""Slow steps are counted by what made them slow."""

import logging

import pytest

from paceline.observe.slow_steps import SlowSteps

USUAL = {"time/wait_s": 0.1, "time/train_s": 0.2, "time/sync_s": 0.01, "time/save_s": 0.0}


def after_usual_steps(**longer: float) -> SlowSteps:
    slow = SlowSteps()
    for step in range(1, 9):
        slow.check(step, USUAL)
    slow.check(9, USUAL | {f"time/{part}": seconds for part, seconds in longer.items()})
    return slow


@pytest.mark.parametrize("part", ["wait_s", "train_s", "sync_s", "save_s"])
def test_slow_step_is_counted_by_part_that_took_longer(part: str) -> None:
    assert after_usual_steps(**{part: 1.0}).causes == {f"time/{part}": 1}


def test_step_up_to_twice_median_is_not_slow() -> None:
    assert not after_usual_steps(wait_s=0.4).causes


def test_first_steps_are_not_compared() -> None:
    slow = SlowSteps()
    slow.check(1, USUAL)
    slow.check(2, USUAL | {"time/train_s": 9.0})
    assert not slow.causes


def test_message_names_step_and_cause(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        after_usual_steps(wait_s=1.0)
    assert "step 9 took 1.21 s" in caplog.text
    assert "0.90 s more for waiting for groups to be generated and scored" in caplog.text
