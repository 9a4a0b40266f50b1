"""Learning-rate schedules and weight decay."""

import math

import pytest
from pydantic import ValidationError
from torch import nn

from paceline.errors import CheckpointError
from paceline.training.optimizer import adamw, check_optimizer_state
from paceline.training.settings import TrainSettings


def rates(total: int, **settings: object) -> list[float]:
    s = TrainSettings.model_validate({"learning_rate": 1.0, **settings})
    return [s.learning_rate_at(step, total) for step in range(total + 1)]


def test_constant_schedule_keeps_learning_rate() -> None:
    assert rates(5) == [1.0] * 6


def test_warmup_rises_linearly_from_above_zero() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]


def test_linear_decay_reaches_zero_after_last_step() -> None:
    assert rates(4, lr_schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates(6, lr_schedule="linear", warmup_steps=2) == pytest.approx(
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    )


def test_cosine_decay_is_half_at_half_time() -> None:
    assert rates(4, lr_schedule="cosine") == pytest.approx(
        [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0]
    )


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"step:b": ()}, "'step:b' belongs to no parameter"),
        ({"exp_avg:a": (3,)}, r"'exp_avg:a' has shape \(3,\), but \(2,\) in this run"),
        ({"step:a": (), "exp_avg:a": (2,)}, "'exp_avg_sq:a' is missing, but 'step:a' exists"),
    ],
)
def test_optimizer_state_is_rejected_when_it_does_not_match(
    saved: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_optimizer_state(saved, {"a": (2,)})


def test_parameter_without_gradient_needs_no_optimizer_state() -> None:
    saved = {"step:a": (), "exp_avg:a": (2,), "exp_avg_sq:a": (2,)}
    check_optimizer_state(saved, {"a": (2,), "b": (3,)})


@pytest.mark.parametrize("betas", [(-0.1, 0.95), (0.9, 1.0)])
def test_betas_are_rejected_when_optimizer_would_reject_them(betas: tuple[float, float]) -> None:
    with pytest.raises(ValidationError, match="betas"):
        TrainSettings(betas=betas)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_learning_rate_is_positive_at_every_step(schedule: str, warmup: int) -> None:
    assert all(rate > 0 for rate in rates(10, lr_schedule=schedule, warmup_steps=warmup)[:10])


def test_cosine_decay_stays_zero_past_last_step() -> None:
    assert TrainSettings(lr_schedule="cosine").learning_rate_at(99, 10) == 0


def test_weight_decay_applies_only_to_matrices() -> None:
    named = dict(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)).named_parameters())
    decay = {
        id(p): group["weight_decay"]
        for group in adamw(named, TrainSettings(weight_decay=0.1)).param_groups
        for p in group["params"]
    }
    assert {name: decay[id(p)] for name, p in named.items()} == {
        "0.weight": 0.1,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
    }
