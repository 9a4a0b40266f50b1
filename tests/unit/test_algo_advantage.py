"""Advantages against a plain restatement of their formulas."""

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
    uniform,
    whiten,
)
from paceline.algo.settings import AlgorithmSettings
from paceline.errors import ConfigError
from paceline.types import Batch

ROWS = st.lists(
    st.tuples(st.floats(-3, 3), st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12
)  # reward, group, length: groups of any size, in any order


def group_of(rows: list[tuple[float, int, int]], row: int) -> list[int]:
    return [i for i, other in enumerate(rows) if other[1] == rows[row][1]]


def columns(rows: list[tuple[float, int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rewards, groups, lengths = zip(*rows, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(lengths)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_each_baseline_is_that_of_its_paper_for_groups_of_any_size(
    rows: list[tuple[float, int, int]],
) -> None:
    rewards, groups, lengths = columns(rows)
    grpo, rloo = (
        minus_group_mean(rewards, groups).tolist(),
        minus_mean_of_others(rewards, groups).tolist(),
    )
    opo, deviations = (
        minus_length_weighted_mean(rewards, groups, lengths).tolist(),
        group_stds(rewards, groups).tolist(),
    )
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
        assert deviations[row] == pytest.approx(
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
    """Definition: sum over later trained tokens of (gamma * lam)^l * delta. What is paid between two trained tokens is the
    first one's; the reward of the answer is the last one's."""
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
def test_gae_is_the_discounted_sum_of_surprises_over_trained_tokens(
    gamma: float, lam: float
) -> None:
    rng = np.random.default_rng(0)
    values, mask, paid = (
        rng.standard_normal((5, 9)),
        rng.random((5, 9)) < 0.6,
        rng.standard_normal((5, 9)),
    )
    mask[4] = False  # nothing trained
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


def test_whitened_advantages_have_mean_0_and_deviation_1_over_trained_tokens() -> None:
    mask = torch.tensor([[True, True, False], [True, False, True]])
    white = whiten(torch.tensor([[1.0, 2.0, 99.0], [4.0, 99.0, -3.0]], dtype=torch.float64), mask)
    assert white[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert white[mask].std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert not white[~mask].any()


MASK = np.array([0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1], np.bool_)  # the second row has two turns


def small_batch() -> Batch:
    zeros = np.zeros(11, np.float32)
    lengths, rewards, groups = (
        np.array([3, 6, 2], np.int32),
        np.array([1, 0, 0.5], np.float32),
        np.array([0, 0, 1], np.int32),
    )
    return Batch(
        np.arange(11, dtype=np.int32), lengths, MASK, zeros, np.zeros(11, np.int32), rewards, groups
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


def test_a_batch_gets_its_rows_advantage_on_trained_tokens_only() -> None:
    batch = small_batch()
    assert filled(batch, name="rloo") == on_rows(1, -1, 0)
    assert filled(batch, name="dr_grpo") == on_rows(0.5, -0.5, 0)
    assert filled(batch, name="grpo") == pytest.approx(
        on_rows(0.5 / math.sqrt(0.5), -0.5 / math.sqrt(0.5), 0), abs=1e-5
    )
    assert filled(batch, name="opo") == pytest.approx(
        on_rows(1 - 2 / 5, -2 / 5, 0)
    )  # lengths 2 and 3
    assert filled(
        replace(batch, baselines=np.array([0.25, 0.25, 1], np.float32)), name="remax"
    ) == on_rows(0.75, -0.25, -0.5)


def test_rewards_of_turns_count_with_the_answers_own() -> None:
    paid = np.zeros(11, np.float32)
    paid[[4, 8]] = (
        0.5,
        1.0,
    )  # two turns of the second row; the first falls on a token that is not trained
    assert filled(replace(small_batch(), token_rewards=paid), name="dr_grpo") == on_rows(
        -0.25, 0.25, 0
    )


def test_reinforce_plus_plus_normalises_the_reward_to_come_over_the_batch() -> None:
    paid = np.linspace(-1, 1, 11).astype(np.float32)
    batch = replace(small_batch(), token_rewards=paid)
    to_come = []
    for row in range(3):
        inside = slice(batch.offsets[row], batch.offsets[row + 1])
        zeros = [0.0] * int(batch.lengths[row])
        to_come += plain_gae(
            float(batch.rewards[row]), paid[inside].tolist(), zeros, MASK[inside].tolist(), 0.9, 1.0
        )
    trained = [value for value, m in zip(to_come, MASK, strict=True) if m]
    mean, deviation = statistics.mean(trained), statistics.pstdev(trained)
    expected = [
        (value - mean) / deviation if m else 0.0 for value, m in zip(to_come, MASK, strict=True)
    ]
    assert filled(batch, name="reinforce++", gamma=0.9) == pytest.approx(expected, abs=1e-5)


def test_its_baseline_variant_takes_the_group_mean_off_first() -> None:
    values = [0.5, 0.5, -0.5, -0.5, -0.5, 0.0]
    mean, deviation = statistics.mean(values), statistics.pstdev(values)
    expected = on_rows(*((value - mean) / deviation for value in (0.5, -0.5, 0.0)))
    assert filled(small_batch(), name="reinforce++_baseline") == pytest.approx(expected, abs=1e-5)


def test_with_a_critic_a_batch_gets_advantages_returns_and_values() -> None:
    paid = np.zeros(11, np.float32)
    paid[7] = 2.0
    batch, values = (
        replace(small_batch(), token_rewards=paid),
        np.linspace(-1, 1, 11).astype(np.float32),
    )
    found = advantages(
        batch, AlgorithmSettings(name="ppo", gamma=0.9, lam=0.8, normalize="none"), values
    )
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


def test_what_an_advantage_needs_and_does_not_get_is_refused() -> None:
    with pytest.raises(ConfigError, match="critic"):
        advantages(small_batch(), AlgorithmSettings(name="ppo"))
    with pytest.raises(ConfigError, match="greedy"):
        advantages(small_batch(), AlgorithmSettings(name="remax"))


def test_equal_rewards_give_no_signal_and_one_good_answer_among_many_a_finite_one() -> None:
    batch = replace(small_batch(), rewards=np.full(3, 0.1, np.float32))
    assert np.abs(filled(batch, name="grpo")).max() < 1e-6
    rewards = torch.tensor([1.0] + [0.0] * 63, dtype=torch.float64)
    assert (
        (minus_group_mean(rewards, torch.zeros(64)) / group_stds(rewards, torch.zeros(64)))
        .isfinite()
        .all()
    )


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


def test_a_batch_with_nothing_to_train_has_advantages_of_zero() -> None:
    nothing = replace(small_batch(), mask=np.zeros(11, np.bool_))
    for name in ("grpo", "reinforce++", "opo"):
        assert not any(filled(nothing, name=name))
