"""Custom advantages, losses and corrections: what they get, and what their results must be."""

import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from examples.custom_advantage import minus_median
from examples.custom_correction import mean_one
from examples.custom_loss import clip
from paceline.algo.advantage import advantages
from paceline.algo.correction import importance_weights
from paceline.algo.custom import check_custom
from paceline.algo.objective import objective
from paceline.algo.settings import AlgorithmSettings
from paceline.config import load_config
from paceline.errors import ConfigError
from paceline.types import Batch
from tests.contract.test_train_engine import random_batch

ROWS = torch.tensor([0, 0, 1, 1, 1])


def settings(**values: Any) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(values)


def advantages_of(function: Any, **more: Any) -> Batch:
    return advantages(random_batch(), settings(advantage=function, **more))


def loss_of(function: Any, **more: Any) -> tuple[Tensor, Tensor]:
    logprobs = torch.linspace(-2, -1, 5, requires_grad=True)
    proximal, advantage = torch.linspace(-1, -2, 5), torch.tensor([1.0, -1.0, 1.0, -1.0, 0.5])
    return objective(logprobs, proximal, advantage, ROWS, settings(loss=function, **more))


def weights_of(function: Any, **more: Any) -> Tensor:
    log_weight = torch.linspace(-2, 2, 5)
    return importance_weights(log_weight, ROWS, settings(correction=function, **more)).values


def test_advantage_per_completion_is_spread_over_trained_tokens() -> None:
    batch = advantages_of(lambda rewards: 10 * rewards)
    expected = np.where(batch.mask, np.repeat(10 * batch.rewards, batch.lengths), 0)
    assert batch.advantages is not None and np.allclose(batch.advantages, expected)


def test_advantage_per_token_is_used_unchanged() -> None:
    batch = advantages_of(lambda batch: batch.mask * batch.logprobs)
    assert batch.advantages is not None
    assert np.array_equal(batch.advantages, batch.mask * batch.logprobs)


def test_example_advantage_subtracts_median_of_group() -> None:
    batch = advantages_of(minus_median)
    for group in np.unique(batch.groups):
        rewards = batch.rewards[batch.groups == group]
        rows = np.flatnonzero(batch.groups == group)
        for row, reward in zip(rows, rewards, strict=True):
            tokens = slice(batch.offsets[row], batch.offsets[row + 1])
            assert batch.advantages is not None
            found = batch.advantages[tokens][batch.mask[tokens]]
            assert np.allclose(found, reward - np.median(rewards))


def test_advantage_gets_all_parameters_that_it_names() -> None:
    seen: dict[str, Any] = {}

    def function(rewards: Any, groups: Any, lengths: Any, batch: Batch, settings: Any) -> Any:
        seen.update(groups=groups, lengths=lengths, gamma=settings.gamma, batch=batch)
        return rewards

    advantages_of(function, gamma=0.5)
    assert seen["gamma"] == 0.5 and seen["lengths"].sum() == seen["batch"].mask.sum()
    assert sorted(set(seen["groups"])) == [0, 1, 2]


def test_custom_advantage_is_not_normalized_by_default() -> None:
    assert settings(advantage=minus_median).normalize == "none"
    assert settings(advantage=minus_median, normalize="batch").normalize == "batch"
    with pytest.raises(ValueError, match="a custom advantage is used as it is"):
        settings(advantage=minus_median, normalize="group")


def test_example_loss_equals_built_in_clip() -> None:
    for found, expected in zip(loss_of(clip), loss_of("clip"), strict=True):
        assert torch.equal(found, expected)


def test_loss_may_use_settings_of_built_in_losses() -> None:
    loss, _ = loss_of(lambda logprobs, settings: settings.clip_low * logprobs, clip_low=0.5)
    assert torch.equal(loss.detach(), 0.5 * torch.linspace(-2, -1, 5))


def test_example_correction_has_mean_one() -> None:
    assert float(weights_of(mean_one).mean()) == pytest.approx(1)


def test_custom_correction_masks_rejected_completions() -> None:
    found = weights_of(lambda log_weight: torch.ones_like(log_weight), reject_range=(1.0, 9.0))
    assert found.tolist() == [0, 0, 1, 1, 1]


def test_custom_correction_needs_recomputed_proximal_policy() -> None:
    assert settings(correction=mean_one).proximal == "recomputed"
    with pytest.raises(ValueError, match="needs proximal = 'recomputed'"):
        settings(correction=mean_one, proximal="interpolated")


def nothing(rewards: Any) -> None: ...


def raises(**_: Any) -> None:
    raise KeyError("gone")


def leaves(**_: Any) -> None:
    sys.exit(0)


LOSSES: list[tuple[Callable[..., Any], str]] = [
    (lambda logprobs: logprobs[:2], r"float32 tensor of shape \(2,\); expected .* shape \(5,\)"),
    (lambda logprobs: logprobs.sum(), r"tensor of shape \(\)"),
    (lambda logprobs: logprobs / 0, "returned NaN or infinity; expected finite numbers"),
    (lambda logprobs: logprobs.detach(), "without a gradient; expected a loss computed from"),
    (lambda logprobs: logprobs.tolist(), "returned list; expected a floating-point tensor"),
    (lambda logprobs: (logprobs, logprobs), "as the second value; expected a bool tensor"),
    (lambda old: old, "has the parameter 'old'; expected only parameters among logprobs, proximal"),
    (raises, r"raised KeyError: 'gone' \(test_algo_custom.py, line \d+\)"),
]
ADVANTAGES: list[tuple[Callable[..., Any], str]] = [
    (lambda rewards: rewards[:-1], r"shape \(5,\); expected 6 numbers, one per completion, or \d+"),
    (lambda rewards: rewards * np.nan, "returned NaN or infinity; expected finite numbers"),
    (lambda batch: np.ones(batch.num_tokens), "tokens that are not trained on; expected 0 where"),
    (nothing, r"returned shape \(\); expected 6 numbers"),
    (lambda rewards: "text", "returned str; expected 6 numbers"),
    (raises, "raised KeyError: 'gone'"),
    (leaves, r"raised SystemExit: 0 \(test_algo_custom.py, line \d+\)"),
]
CORRECTIONS: list[tuple[Callable[..., Any], str]] = [
    (lambda log_weight: log_weight[1:], r"shape \(4,\); expected .* shape \(5,\)"),
    (lambda log_weight: log_weight, "returned a negative weight; expected factors of at least 0"),
    (lambda log_weight: (1000 * log_weight).exp(), "returned NaN or infinity"),
    (lambda log_weight: log_weight > 0, r"returned a torch.bool tensor .* expected a floating"),
    (raises, "raised KeyError: 'gone'"),
]


@pytest.mark.parametrize(
    ("run", "setting", "function", "message"),
    [
        (run, setting, function, message)
        for run, setting, cases in (
            (advantages_of, "advantage", ADVANTAGES),
            (loss_of, "loss", LOSSES),
            (weights_of, "correction", CORRECTIONS),
        )
        for function, message in cases
    ],
)
def test_wrong_result_is_error_that_names_function(
    run: Callable[..., Any], setting: str, function: Callable[..., Any], message: str
) -> None:
    name = f"algorithm.{setting} = 'tests.unit.test_algo_custom:{function.__qualname__}' "
    with pytest.raises(ConfigError, match=message) as error:
        run(function)
    assert str(error.value).startswith(name)


@pytest.mark.parametrize("setting", ["advantage", "loss", "correction"])
def test_typo_in_built_in_name_is_explained(setting: str) -> None:
    typo = {"advantage": "groop", "loss": "clipp", "correction": "trunkate"}[setting]
    right = {"advantage": "group", "loss": "clip", "correction": "truncate"}[setting]
    with pytest.raises(ConfigError, match=rf"algorithm\.{setting}: '{typo}' .* mean '{right}'\?"):
        load_config(None, [f"algorithm.{setting}={typo}"])


def test_missing_file_is_found_in_settings() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.loss: no file 'gone\.py'"):
        load_config(None, ["algorithm.loss=gone.py:f"])


def test_check_rejects_missing_function_before_run() -> None:
    found = settings(loss="examples/custom_loss.py:clib")
    with pytest.raises(ConfigError, match=r"clib': no 'clib' in .*; it defines clip"):
        check_custom(found)


def test_check_rejects_wrong_parameter_before_run() -> None:
    with pytest.raises(ConfigError, match="has the parameter 'old'"):
        check_custom(settings(loss=lambda logprobs, old: logprobs))


def test_names_of_custom_functions_are_part_of_settings() -> None:
    dumped = settings(loss=clip, advantage=minus_median).model_dump(mode="json")
    assert dumped["loss"] == "examples.custom_loss:clip"
    assert dumped["advantage"] == "examples.custom_advantage:minus_median"
    assert settings(**dumped) == settings(loss=clip, advantage=minus_median)


def test_settings_with_local_function_survive_pickling() -> None:
    found = pickle.loads(pickle.dumps(settings(loss=lambda logprobs: -logprobs)))
    logprobs = torch.zeros(5, requires_grad=True)
    loss, _ = objective(logprobs, logprobs, logprobs, ROWS, found)
    assert loss.requires_grad


def test_critic_settings_have_no_effect_with_custom_advantage() -> None:
    with pytest.raises(ValueError, match="critic_warmup = 2 has no effect"):
        settings(advantage=minus_median, critic_warmup=2)
