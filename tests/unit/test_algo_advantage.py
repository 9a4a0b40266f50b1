"""Advantages compared with their formulas in plain Python."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.algo.advantage import (
    advantages,
    gae,
    group_stds,
    minus_group_mean,
    minus_length_weighted_mean,
    minus_mean_of_others,
    whiten,
)
from paceline.algo.settings import AlgorithmSettings
from paceline.algo.tolerance import uniform, uniform_groups
from paceline.errors import ConfigError
from paceline.types import Batch

# Rows of reward, group and length: groups of any size, in any order.
ROWS = st.lists(
    st.tuples(st.floats(-3, 3), st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12
)


def group_of(rows: list[tuple[float, int, int]], row: int) -> list[int]:
    return [i for i, other in enumerate(rows) if other[1] == rows[row][1]]


def columns(rows: list[tuple[float, int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rewards, groups, lengths = zip(*rows, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(lengths)


@settings(max_examples=60)
@given(ROWS)
def test_baselines_match_their_papers_for_groups_of_any_size(
    rows: list[tuple[float, int, int]],
) -> None:
    rewards, groups, lengths = columns(rows)
    grpo, rloo = (
        minus_group_mean(rewards, groups).tolist(),
        minus_mean_of_others(rewards, groups).tolist(),
    )
    opo = minus_length_weighted_mean(rewards, groups, lengths).tolist()
    stds = group_stds(rewards, groups).tolist()
    for row, (reward, _, _) in enumerate(rows):
        members = group_of(rows, row)
        others = [rows[i][0] for i in members if i != row]
        assert grpo[row] == pytest.approx(
            reward - statistics.mean(rows[i][0] for i in members), abs=1e-9
        )
        assert rloo[row] == pytest.approx(
            reward - statistics.mean(others) if others else 0.0, abs=1e-9
        )
        weighted = sum(rows[i][0] * rows[i][2] for i in members) / sum(rows[i][2] for i in members)
        assert opo[row] == pytest.approx(reward - weighted, abs=1e-9)
        assert stds[row] == pytest.approx(
            statistics.stdev(rows[i][0] for i in members) if others else 0.0, abs=1e-9
        )


def plain_gae(
    reward: float,
    token_rewards: list[float],
    values: list[float],
    mask: list[bool],
    gamma: float,
    lam: float,
) -> list[float]:
    """Return the sum over later trained tokens of (gamma * lam)^l * delta.

    Rewards between two trained tokens belong to the first one, the reward of the completion to
    the last trained token.
    """
    times = [t for t, m in enumerate(mask) if m]
    deltas = []
    for i, t in enumerate(times):
        last = i + 1 == len(times)
        until = len(mask) if last else times[i + 1]
        paid = sum(token_rewards[t:until]) + (reward if last else 0.0)
        deltas.append(paid + gamma * (0.0 if last else values[until]) - values[t])
    result = [0.0] * len(values)
    for i, t in enumerate(times):
        result[t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(times)))
    return result


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (0.9, 0.0), (0.0, 0.5)])
def test_gae_is_discounted_sum_of_td_errors_over_trained_tokens(gamma: float, lam: float) -> None:
    rng = np.random.default_rng(0)
    values, mask = rng.standard_normal((5, 9)), rng.random((5, 9)) < 0.6
    paid = rng.standard_normal((5, 9))
    mask[4] = False  # a row without trained tokens
    rewards = rng.standard_normal(5)
    arguments = [torch.from_numpy(a) for a in (rewards, values, mask)]
    for token_rewards in (np.zeros((5, 9)), paid):
        found, returns = gae(*arguments, gamma, lam, torch.from_numpy(token_rewards))
        for row in range(5):
            expected = plain_gae(
                rewards[row],
                token_rewards[row].tolist(),
                values[row].tolist(),
                mask[row].tolist(),
                gamma,
                lam,
            )
            assert found[row].tolist() == pytest.approx(expected, abs=1e-12)
            assert returns[row].tolist() == pytest.approx(
                [
                    a + v if m else 0.0
                    for a, v, m in zip(expected, values[row], mask[row], strict=True)
                ]
            )


def test_whiten_scales_trained_tokens_to_mean_0_std_1() -> None:
    mask = torch.tensor([[True, True, False], [True, False, True]])
    white = whiten(torch.tensor([[1.0, 2.0, 99.0], [4.0, 99.0, -3.0]], dtype=torch.float64), mask)
    assert white[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert white[mask].std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert not white[~mask].any()


MASK = np.array([0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1], np.bool_)  # the second row has two turns


def small_batch() -> Batch:
    zeros = np.zeros(11, np.float32)
    return Batch(
        tokens=np.arange(11, dtype=np.int32),
        lengths=np.array([3, 6, 2], np.int32),
        mask=MASK,
        logprobs=zeros,
        versions=np.zeros(11, np.int32),
        rewards=np.array([1, 0, 0.5], np.float32),
        groups=np.array([0, 0, 1], np.int32),
    )


def filled(batch: Batch, **algorithm: object) -> list[float]:
    found = advantages(batch, AlgorithmSettings.model_validate(algorithm)).advantages
    assert found is not None and found.dtype == np.float32
    return found.tolist()


def on_rows(first: float, second: float, third: float) -> list[float]:
    return [
        value if m else 0.0
        for value, m in zip([first] * 3 + [second] * 6 + [third] * 2, MASK, strict=True)
    ]


def test_advantages_give_trained_tokens_their_row_advantage() -> None:
    batch = small_batch()
    assert filled(batch, name="rloo") == on_rows(1, -1, 0)
    assert filled(batch, name="dr_grpo") == on_rows(0.5, -0.5, 0)
    assert filled(batch, name="grpo") == pytest.approx(
        on_rows(0.5 / math.sqrt(0.5), -0.5 / math.sqrt(0.5), 0), abs=1e-5
    )
    lengths = (2, 3)
    mean = lengths[0] / sum(lengths)
    assert filled(batch, name="opo") == pytest.approx(on_rows(1 - mean, -mean, 0))
    greedy = replace(batch, baselines=np.array([0.25, 0.25, 1], np.float32))
    assert filled(greedy, name="remax") == on_rows(0.75, -0.25, -0.5)


def test_advantages_include_turn_rewards() -> None:
    paid = np.zeros(11, np.float32)
    # Two turns of the second row; the first reward is at a token that is not trained.
    paid[[4, 8]] = 0.5, 1.0
    batch = replace(small_batch(), token_rewards=paid)
    assert filled(batch, name="dr_grpo") == on_rows(-0.25, 0.25, 0)


def test_reinforce_plus_plus_whitens_future_rewards_over_batch() -> None:
    paid = np.linspace(-1, 1, 11).astype(np.float32)
    batch = replace(small_batch(), token_rewards=paid)
    future = []
    for row in range(3):
        inside = slice(batch.offsets[row], batch.offsets[row + 1])
        zeros = [0.0] * int(batch.lengths[row])
        future += plain_gae(
            float(batch.rewards[row]), paid[inside].tolist(), zeros, MASK[inside].tolist(), 0.9, 1.0
        )
    trained = [value for value, m in zip(future, MASK, strict=True) if m]
    mean, std = statistics.mean(trained), statistics.pstdev(trained)
    expected = [(value - mean) / std if m else 0.0 for value, m in zip(future, MASK, strict=True)]
    assert filled(batch, name="reinforce++", gamma=0.9) == pytest.approx(expected, abs=1e-5)


def test_reinforce_plus_plus_baseline_subtracts_group_mean_first() -> None:
    values = [0.5, 0.5, -0.5, -0.5, -0.5, 0.0]
    mean, std = statistics.mean(values), statistics.pstdev(values)
    expected = on_rows(*((value - mean) / std for value in (0.5, -0.5, 0.0)))
    assert filled(small_batch(), name="reinforce++_baseline") == pytest.approx(expected, abs=1e-5)


def test_advantages_add_returns_when_critic_gives_values() -> None:
    paid = np.zeros(11, np.float32)
    paid[7] = 2.0
    batch = replace(small_batch(), token_rewards=paid)
    values = np.linspace(-1, 1, 11).astype(np.float32)
    algorithm = AlgorithmSettings(name="ppo", gamma=0.9, lam=0.8, normalize="none")
    found = advantages(batch, algorithm, values)
    assert found.advantages is not None and found.returns is not None and found.values is values
    for row in range(3):
        inside = slice(batch.offsets[row], batch.offsets[row + 1])
        expected = plain_gae(
            float(batch.rewards[row]),
            paid[inside].tolist(),
            values[inside].tolist(),
            MASK[inside].tolist(),
            0.9,
            0.8,
        )
        assert found.advantages[inside].tolist() == pytest.approx(expected, abs=1e-6)
        returns = np.where(MASK[inside], expected + values[inside], 0.0)
        assert found.returns[inside].tolist() == pytest.approx(returns.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "missing"),
    [(AlgorithmSettings(name="ppo"), "critic"), (AlgorithmSettings(name="remax"), "greedy")],
)
def test_advantages_fail_when_baseline_is_missing(
    algorithm: AlgorithmSettings, missing: str
) -> None:
    with pytest.raises(ConfigError, match=missing):
        advantages(small_batch(), algorithm)


def test_rare_reward_has_large_advantage_when_normalized_in_its_group() -> None:
    rewards = np.zeros(64, np.float32)
    rewards[0] = 1.0
    batch = Batch(
        tokens=np.zeros(128, np.int32),
        lengths=np.full(64, 2, np.int32),
        mask=np.tile([False, True], 64),
        logprobs=np.zeros(128, np.float32),
        versions=np.zeros(128, np.int32),
        rewards=rewards,
        groups=np.zeros(64, np.int32),
    )
    # The mean is 1/64, and the standard deviation 1/8.
    expected = [63 / 8] + [-1 / 8] * 63
    assert filled(batch, name="grpo")[1::2] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "reinforce++_baseline"])
def test_advantages_are_zero_when_rewards_differ_by_rounding(name: str) -> None:
    paid = np.zeros(11, np.float32)
    paid[[1, 2, 8]] = 0.1, 0.2, 0.3  # both rows of the first group get 0.3
    batch = replace(small_batch(), rewards=np.zeros(3, np.float32), token_rewards=paid)
    assert sum(map(float, paid[[1, 2]])) != float(paid[8])
    assert not any(filled(batch, name=name))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.3, 0.1 + 0.2], True),
        ([30.0, 30.00001], True),
        ([0.5], True),
        ([0.3, 0.30001], False),
        ([1.0, 1.0, 0.0], False),
    ],
)
def test_uniform_ignores_rounding_only(rewards: list[float], expected: bool) -> None:
    assert uniform(rewards) is expected
    others = [0.0, 5.0]  # of another group, between the first and the other rows
    rows = np.array([rewards[0], *others, *rewards[1:]])
    groups = np.array([0, 1, 1, *[0] * (len(rewards) - 1)], np.int32)
    found = uniform_groups(rows, groups)
    assert found[groups == 0].tolist() == [expected] * len(rewards)
    assert not found[groups == 1].any()


def test_advantages_are_zero_when_no_token_is_trained() -> None:
    nothing = replace(small_batch(), mask=np.zeros(11, np.bool_))
    for name in ("grpo", "reinforce++", "opo"):
        assert not any(filled(nothing, name=name))
