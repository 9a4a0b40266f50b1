"""A run compares itself with its prediction and says what differs."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.simulator.prediction import (
    ENOUGH_STEPS,
    Prediction,
    PredictionCheck,
    read_prediction,
    write_prediction,
)

PREDICTED: dict[str, Any] = {
    "mode": "hybrid sync",
    "settings": ("schedule.max_staleness=0",),
    "lengths": "fixed:100",
    "max_staleness": 0,
    "steps_per_s": 1.0,
    "limit_steps_per_s": 1.2,
    "staleness_mean": 0.0,
    "completions": 10,
    "completion_tokens": 100.0,
    "prompt_tokens": 0.0,
    "generate_s": 0.6,
    "train_s": 0.4,
    "sync_s": 0.0,
}
AS_PREDICTED = {
    "rollout/trajectories": 10.0,
    "rollout/samples": 15.0,  # a trajectory may have several rows
    "rollout/tokens": 1000.0,
    "time/train_s": 0.4,
    "time/sync_s": 0.0,
    "device/generation_s": 0.6,
    "device/total_s": 1.0,
}


def compared(
    step_s: float,
    changed: Mapping[str, float] | None = None,
    steps: int = 12,
    max_staleness: int = 0,
) -> Any:
    """Return the comparison of steps that take some seconds, with these changed metrics."""
    now = 0.0
    check = PredictionCheck(Prediction(**PREDICTED), max_staleness, lambda: now)
    for number in range(steps + 2 + max_staleness):
        now += 30.0 if number < 2 else step_s  # kernels are compiled in the first steps
        check.step_done(number + 1, {**AS_PREDICTED, **(changed or {})})
    return check.summary()


def test_run_as_fast_as_predicted_is_not_off() -> None:
    found = compared(1.1)
    assert not found["off"] and found["reasons"] == []
    assert found["text"] == "0.909 steps/s, predicted 1 (-9%)"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rollout/tokens": 2000.0, "time/train_s": 0.8, "device/generation_s": 1.2}, "are longer"),
        ({"device/generation_s": 1.2}, "generating a token takes 2.00x of the predicted time"),
        ({"time/train_s": 1.2}, "training a token takes 3.00x of the predicted time"),
        ({"device/wait_reward_s": 0.4}, "waiting for rewards: 40% of the device time"),
        ({"time/sync_s": 0.5}, "a weight sync takes 0.5 s, predicted 0"),
        ({"device/wait_checkpoint_s": 0.3}, "checkpoints: 30% of the device time"),
        ({"rollout/trajectories": 20.0, "rollout/tokens": 2000.0}, "a step has 20 completions"),
    ],
)
def test_slow_run_names_part_that_differs(changed: dict[str, float], words: str) -> None:
    found = compared(2.0, changed)
    assert found["off"]
    assert any(words in reason for reason in found["reasons"]), found["reasons"]
    assert found["error"] == pytest.approx(-0.5)


def test_run_with_longer_completions_is_explained_by_lengths_alone() -> None:
    longer = {"rollout/tokens": 2000.0, "time/train_s": 0.8, "device/generation_s": 1.2}
    assert compared(2.0, longer)["reasons"] == ["completions are longer: 200 tokens, predicted 100"]


def test_faster_run_is_off_too() -> None:
    assert compared(0.5)["text"] == (
        "2 steps/s, predicted 1 (+100%): no single part explains it, see device time"
    )


def test_other_staleness_bound_is_reason() -> None:
    assert "max_staleness is 2, predicted 0" in compared(3.0, max_staleness=2)["reasons"]


def test_run_with_too_few_steps_is_not_compared() -> None:
    assert compared(1.0, steps=0) is None


def test_comparison_is_logged_once_after_enough_steps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        compared(2.0, steps=ENOUGH_STEPS - 1)
        assert not caplog.records
        compared(2.0, steps=3 * ENOUGH_STEPS)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "predicted 1" in record.getMessage()


def test_prediction_file_is_read_back(tmp_path: Path) -> None:
    write_prediction(tmp_path / "prediction.json", Prediction(**PREDICTED))
    assert read_prediction(tmp_path / "prediction.json") == Prediction(**PREDICTED)


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "cannot be read"), (b"{}", "mode: "), (b"\xeb", "the file: Invalid JSON")],
)
def test_wrong_prediction_file_is_rejected(tmp_path: Path, text: bytes | None, words: str) -> None:
    path = tmp_path / "prediction.json"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=words) as error:
        read_prediction(path)
    assert "paceline plan RECIPE --probe" in str(error.value)
