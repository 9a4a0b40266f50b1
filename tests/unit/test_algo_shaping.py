"""Over-long completions and the KL penalty in the reward."""

from dataclasses import replace

import numpy as np
import pytest

from paceline.algo.settings import AlgorithmSettings
from paceline.algo.shaping import last_turn_lengths, overlong_penalty, shape_rewards
from paceline.errors import ConfigError
from paceline.types import Batch


def batch() -> Batch:
    # Trained tokens per row: four; one and two, in two turns; none.
    mask = np.array([0, 1, 1, 1, 1, 0, 1, 0, 1, 1, 0, 0], np.bool_)
    logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
    lengths = np.array([5, 5, 2], np.int32)
    rewards, groups = np.array([1, 0, 0.5], np.float32), np.array([0, 0, 1], np.int32)
    return Batch(
        np.arange(12, dtype=np.int32),
        lengths,
        mask,
        logprobs,
        np.zeros(12, np.int32),
        rewards,
        groups,
        truncated=np.array([True, False, False]),
    )


def test_overlong_penalty_matches_dapo() -> None:
    max_length, buffer = 20, 8
    lengths = np.arange(0, 24)
    for length, found in zip(lengths, overlong_penalty(lengths, max_length, buffer), strict=True):
        if length <= max_length - buffer:
            expected = 0.0
        elif length <= max_length:
            expected = ((max_length - buffer) - length) / buffer
        else:
            expected = -1.0
        assert found == pytest.approx(expected)


def test_last_turn_lengths_ignore_earlier_turns() -> None:
    assert last_turn_lengths(batch()).tolist() == [4, 2, 0]


def test_overlong_penalty_is_added_to_reward() -> None:
    shaped = shape_rewards(
        batch(), AlgorithmSettings(overlong="penalty", overlong_buffer=3), max_length=4
    )
    assert shaped.rewards.tolist() == pytest.approx([1 - 1, 0 - 1 / 3, 0.5])


def test_overlong_buffer_is_at_least_one_token_by_default() -> None:
    shaped = shape_rewards(batch(), AlgorithmSettings(overlong="penalty"), max_length=4)
    assert shaped.rewards.tolist() == pytest.approx([0, 0, 0.5])


def test_overlong_penalty_fails_when_max_length_is_missing() -> None:
    with pytest.raises(ConfigError, match="max_length"):
        shape_rewards(batch(), AlgorithmSettings(overlong="penalty"))


def test_overlong_mask_excludes_truncated_completions() -> None:
    shaped = shape_rewards(batch(), AlgorithmSettings(overlong="mask"))
    assert not shaped.mask[:5].any() and (shaped.mask[5:] == batch().mask[5:]).all()
    assert shaped.rewards.tolist() == batch().rewards.tolist()
    assert (shape_rewards(batch(), AlgorithmSettings(overlong="keep")).mask == batch().mask).all()


def test_kl_penalty_is_subtracted_from_token_rewards() -> None:
    given = replace(
        batch(),
        ref_logprobs=np.full(12, -1.5, np.float32),
        token_rewards=np.full(12, 0.1, np.float32),
    )
    settings = AlgorithmSettings(kl_coef=0.2, kl_placement="reward", kl_estimator="k1")
    found = shape_rewards(given, settings).token_rewards
    assert found is not None and found.tolist() == pytest.approx(
        [0.1 - 0.2 * 0.5 if m else 0.1 for m in given.mask]
    )
    adapted = shape_rewards(given, settings, kl_coef=0.4).token_rewards
    assert adapted is not None and adapted[1] == pytest.approx(0.1 - 0.4 * 0.5)
    in_loss = shape_rewards(given, AlgorithmSettings(kl_coef=0.2))
    assert in_loss.token_rewards is given.token_rewards
    with pytest.raises(ConfigError, match="reference"):
        shape_rewards(batch(), settings)


@pytest.mark.parametrize("proximal", ["behavior", "recomputed", "interpolated"])
def test_kl_in_reward_is_that_of_sampling_policy_with_any_proximal(proximal: str) -> None:
    given = replace(batch(), ref_logprobs=np.full(12, -1.5, np.float32))
    settings = AlgorithmSettings.model_validate(
        {
            "kl_coef": 0.2,
            "kl_placement": "reward",
            "kl_estimator": "k1",
            "proximal": proximal,
            "epochs": 2,
        }
    )
    found = shape_rewards(given, settings).token_rewards
    expected = np.where(given.mask, -0.2 * (given.logprobs + 1.5), 0.0)
    assert found is not None and found.tolist() == pytest.approx(expected.tolist())
