"""Advantages against a plain restatement of their formulas."""

import math
import statistics

import numpy as np
import pytest
import torch

from paceline.algo.advantage import advantages, gae, grpo, rloo, whiten
from paceline.algo.settings import AlgorithmSettings
from paceline.errors import ConfigError
from paceline.types import Batch

REWARDS = [1.0, 0.0, 0.5, 0.25, 2.0, 2.0, 0.125, 3.0]
GROUPS = [0, 0, 0, 7, 7, 7, 3, 7]  # of 3, 4 and 1, not in order


def others(row: int) -> list[float]:
    return [r for i, (r, g) in enumerate(zip(REWARDS, GROUPS, strict=True)) if g == GROUPS[row] and i != row]


def group(row: int) -> list[float]:
    return [*others(row), REWARDS[row]]


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(GROUPS)


def test_grpo_is_the_distance_from_the_group_mean_in_sample_deviations() -> None:
    for row, found in enumerate(grpo(*tensors()).tolist()):
        members = group(row)
        expected = 0.0
        if len(members) > 1:
            expected = (REWARDS[row] - statistics.mean(members)) / (statistics.stdev(members) + 1e-6)
        assert found == pytest.approx(expected, abs=1e-12)


def test_grpo_without_std_is_the_distance_from_the_group_mean() -> None:
    for row, found in enumerate(grpo(*tensors(), normalize_std=False).tolist()):
        assert found == pytest.approx(REWARDS[row] - statistics.mean(group(row)), abs=1e-12)


def test_rloo_is_the_distance_from_the_mean_of_the_others() -> None:
    for row, found in enumerate(rloo(*tensors()).tolist()):
        expected = REWARDS[row] - statistics.mean(others(row)) if others(row) else 0.0
        assert found == pytest.approx(expected, abs=1e-12)


def test_a_group_of_equal_rewards_gives_no_signal() -> None:
    rewards, groups = torch.full((3,), 0.1, dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    assert grpo(rewards, groups).abs().max() < 1e-9
    assert rloo(rewards, groups).abs().max() < 1e-9


def plain_gae(reward: float, values: list[float], mask: list[bool], gamma: float, lam: float) -> list[float]:
    """Definition: sum over later trained tokens of (gamma * lam)^l * delta."""
    times = [t for t, m in enumerate(mask) if m]
    deltas = []
    for i, t in enumerate(times):
        last = i + 1 == len(times)
        deltas.append((reward if last else 0.0) + gamma * (0.0 if last else values[times[i + 1]]) - values[t])
    result = [0.0] * len(values)
    for i, t in enumerate(times):
        result[t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(times)))
    return result


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (0.9, 0.0), (0.0, 0.5)])
def test_gae_is_the_discounted_sum_of_surprises_over_trained_tokens(gamma: float, lam: float) -> None:
    rng = np.random.default_rng(0)
    values, mask = rng.standard_normal((5, 9)), rng.random((5, 9)) < 0.6
    mask[4] = False  # nothing trained
    rewards = rng.standard_normal(5)
    found, returns = gae(torch.from_numpy(rewards), torch.from_numpy(values), torch.from_numpy(mask), gamma, lam)
    for row in range(5):
        expected = plain_gae(rewards[row], values[row].tolist(), mask[row].tolist(), gamma, lam)
        assert found[row].tolist() == pytest.approx(expected, abs=1e-12)
        assert returns[row].tolist() == pytest.approx(
            [a + v if m else 0.0 for a, v, m in zip(expected, values[row], mask[row], strict=True)]
        )


def test_whitened_advantages_have_mean_0_and_deviation_1_over_trained_tokens() -> None:
    mask = torch.tensor([[True, True, False], [True, False, True]])
    white = whiten(torch.tensor([[1.0, 2.0, 99.0], [4.0, 99.0, -3.0]], dtype=torch.float64), mask)
    assert white[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert white[mask].std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert not white[~mask].any()


def small_batch() -> Batch:
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 1, 0, 1], np.bool_)
    zeros = np.zeros(10, np.float32)
    lengths, rewards, groups = np.array([3, 5, 2], np.int32), np.array([1, 0, 0.5], np.float32), np.array([0, 0, 1], np.int32)
    return Batch(np.arange(10, dtype=np.int32), lengths, mask, zeros, np.zeros(10, np.int32), rewards, groups)


def test_a_batch_gets_its_rows_advantage_on_trained_tokens_only() -> None:
    filled = advantages(small_batch(), AlgorithmSettings(name="rloo"))
    assert filled.advantages is not None and filled.advantages.dtype == np.float32
    assert filled.advantages.tolist() == [0, 1, 1, 0, 0, -1, -1, -1, 0, 0]


def test_with_a_critic_a_batch_gets_advantages_returns_and_values() -> None:
    batch, values = small_batch(), np.linspace(-1, 1, 10).astype(np.float32)
    filled = advantages(batch, AlgorithmSettings(name="ppo", gamma=0.9, lam=0.8, normalize_std=False), values)
    assert filled.advantages is not None and filled.returns is not None and filled.values is values
    offsets = batch.offsets
    for row in range(3):
        inside = slice(offsets[row], offsets[row + 1])
        expected = plain_gae(float(batch.rewards[row]), values[inside].tolist(), batch.mask[inside].tolist(), 0.9, 0.8)
        assert filled.advantages[inside].tolist() == pytest.approx(expected, abs=1e-6)


def test_ppo_without_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="critic"):
        advantages(small_batch(), AlgorithmSettings(name="ppo"))


def test_one_good_answer_among_many_is_finite() -> None:
    rewards = torch.tensor([1.0] + [0.0] * 63, dtype=torch.float64)
    assert all(math.isfinite(a) for a in grpo(rewards, torch.zeros(64)).tolist())
