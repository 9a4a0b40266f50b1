"""Trajectories of several rows: they count once in every baseline, length and metric."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.algo.advantage import advantages
from paceline.algo.joined_rows import apart, joined, rows_of_trajectories
from paceline.algo.loss import token_weights
from paceline.algo.presets import PRESETS
from paceline.algo.settings import AlgorithmSettings
from paceline.algo.shaping import shape_rewards
from paceline.group_metrics import equal_rewards, measure
from paceline.model.packing import select_rows
from paceline.observe.flops import row_lengths
from paceline.training.actor import Actor
from paceline.training.assembly import assemble
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice
from paceline.training.trainer import mean_reward
from paceline.types import Batch, End, Finish, Group, Prompt, Trajectory, Turn
from tests.contract.test_train_engine import tiny
from tests.unit.test_assembly import completion


def conversation(
    reward: float, *turns: tuple[int, float], split: bool, finish: Finish = Finish.STOP
) -> Trajectory:
    """Return a trajectory with turns of this many tokens and this reward. All tokens are in the
    vocabulary of a tiny model; a turn that restarts repeats what was said, without the last token
    of each completion."""
    made: list[Turn] = []
    seen: tuple[int, ...] = (1, 2)
    for number, (length, paid) in enumerate(turns):
        tokens = tuple(3 + number + n for n in range(length))
        last = finish if number == len(turns) - 1 else Finish.STOP
        restarts = split and number > 0
        prompt = seen if restarts or not number else (9,)
        made.append(Turn(prompt, completion(*tokens, finish=last), paid, restarts))
        seen = (*seen, *tokens[:-1], 9)
    return Trajectory(tuple(made), "", reward, end=End.DONE)


def groups(split: bool) -> list[Group]:
    """Return two groups of different sizes; half of the trajectories may be split."""
    one = (
        conversation(1.0, (3, 0.5), (1, 0.0), (4, 0.25), split=split),
        conversation(0.0, (2, 0.0), split=False),
        conversation(0.25, (2, 0.0), (5, 0.0), split=split, finish=Finish.LENGTH),
    )
    two = (
        conversation(0.5, (1, 0.0), (2, -1.0), split=split),
        conversation(0.75, (7, 0.0), split=False),
    )
    prompt = Prompt("p", (1, 2), "", {})
    return [Group(number, prompt, found, 0.0, 0.0, 0.5) for number, found in enumerate((one, two))]


def batch_of(split: bool) -> Batch:
    batch = assemble(groups(split))
    trained = np.flatnonzero(batch.mask)
    reference = np.zeros(batch.num_tokens, np.float32)
    reference[trained] = np.linspace(-2, -1, len(trained))
    return replace(batch, ref_logprobs=reference)


def values_of(batch: Batch) -> Any:
    values = np.zeros(batch.num_tokens, np.float32)
    values[batch.mask] = np.linspace(-1, 1, int(batch.mask.sum()))
    return values


def trained(batch: Batch, settings: AlgorithmSettings) -> list[list[float]]:
    """Return advantages, returns and weights in the loss of the trained tokens."""
    values = values_of(batch) if settings.needs_critic else None
    done = advantages(shape_rewards(batch, settings, 8), settings, values)
    weights = token_weights(done, settings.aggregation, 8)
    assert done.lengths.tolist() == batch.lengths.tolist() and done.advantages is not None
    found = [done.advantages, weights] + ([] if done.returns is None else [done.returns])
    return [array[batch.mask].tolist() for array in found]


def test_split_trajectory_has_row_per_context_with_same_reward() -> None:
    batch = assemble(groups(split=True))
    assert batch.trajectories is not None and batch.truncated is not None
    assert batch.trajectories.tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 4]
    assert batch.groups.tolist() == [0] * 6 + [1] * 3
    assert batch.rewards.tolist() == [1, 1, 1, 0, 0.25, 0.25, 0.5, 0.5, 0.75]
    assert batch.truncated.tolist() == [False] * 4 + [True] * 2 + [False] * 3
    assert batch.lengths.tolist() == [5, 6, 10, 4, 4, 9, 3, 5, 9]
    assert assemble(groups(split=False)).trajectories is None


CHANGES: list[dict[str, Any]] = [
    *({"name": name, "kl_coef": 0.1} for name in PRESETS),
    {"name": "grpo", "overlong": "mask"},
    {"name": "grpo", "overlong": "penalty", "overlong_buffer": 4},
    {"name": "ppo", "gamma": 0.9, "lam": 0.8, "normalize": "none"},
    {"name": "reinforce++", "gamma": 0.9, "normalize": "none"},
    {"advantage": lambda rewards, groups, lengths: rewards - rewards[groups == 0].mean() + lengths},
]


@pytest.mark.parametrize(
    "change",
    CHANGES,
    ids=lambda change: "-".join(map(str, change.values() if "name" in change else change)),
)
def test_advantages_and_weights_are_those_of_one_row(change: dict[str, Any]) -> None:
    settings = AlgorithmSettings.model_validate(change)
    assert trained(batch_of(split=True), settings) == trained(batch_of(split=False), settings)


def test_group_advantage_of_split_trajectory_is_computed_by_hand() -> None:
    rows = (
        conversation(1.0, (1, 0.0), (1, 0.0), (1, 0.0), split=True),
        conversation(0.0, (2, 0.0), split=False),
        conversation(0.0, (1, 0.0), split=False),
    )
    group = Group(0, Prompt("p", (1, 2), "", {}), rows, 0.0, 0.0)
    settings = AlgorithmSettings()
    batch = advantages(assemble([group]), settings)
    assert batch.advantages is not None
    # Mean 1/3, sample standard deviation sqrt(((2/3)^2 + 2 (1/3)^2) / 2) = 0.57735. With a row per
    # reward, the mean would be 3/5.
    expected = [(2 / 3) / 0.57735] * 3 + [(-1 / 3) / 0.57735] * 3
    assert batch.advantages[batch.mask] == pytest.approx(expected, rel=1e-4)
    # Three trajectories, of 3, 2 and 1 tokens.
    weights = token_weights(batch, "sequence")[batch.mask]
    assert weights == pytest.approx([1 / 9] * 3 + [1 / 6] * 2 + [1 / 3])


def test_returns_continue_in_next_row_by_hand() -> None:
    split = conversation(4.0, (1, 1.0), (2, 2.0), split=True)
    batch = assemble([Group(0, Prompt("p", (1, 2), "", {}), (split,), 0.0, 0.0)])
    values = np.zeros(batch.num_tokens, np.float32)
    values[batch.mask] = [0.5, 1.5, 2.5]
    settings = AlgorithmSettings(name="ppo", gamma=0.5, lam=1.0, normalize="none")
    done = advantages(batch, settings, values)
    assert done.returns is not None and done.advantages is not None
    # From the right: 2 + 4; half of it; 1 and half of that.
    assert done.returns[batch.mask].tolist() == [2.5, 3.0, 6.0]
    assert done.advantages[batch.mask].tolist() == [2.0, 1.5, 3.5]


def test_custom_advantage_gets_one_entry_per_trajectory() -> None:
    seen: dict[str, Any] = {}

    def remember(rewards: Any, groups: Any, lengths: Any, batch: Batch) -> Any:
        seen.update(rewards=rewards, groups=groups, lengths=lengths, rows=batch.num_rows)
        return rewards

    advantages(batch_of(split=True), AlgorithmSettings.model_validate({"advantage": remember}))
    assert seen["rewards"].tolist() == [1.75, 0.0, 0.25, -0.5, 0.75] and seen["rows"] == 5
    assert seen["groups"].tolist() == [0, 0, 0, 1, 1]
    assert seen["lengths"].tolist() == [8, 2, 7, 3, 7]


def test_rows_are_as_before_when_joined_and_taken_apart() -> None:
    batch = batch_of(split=True)
    again = apart(joined(batch), batch)
    for name in ("tokens", "lengths", "rewards", "groups", "truncated", "trajectories"):
        assert np.array_equal(getattr(again, name), getattr(batch, name)), name


def test_mini_batches_keep_rows_of_trajectory_together() -> None:
    train, settings = TrainSettings(), AlgorithmSettings(mini_batches=2)
    actor = Actor(SingleDevice(tiny("qwen2"), train), settings, train, 10, max_length=8)
    parts = actor.first_epoch(batch_of(split=True), step=3)
    found = [set(part.trajectories.tolist()) for part in parts if part.trajectories is not None]
    assert len(found) == 2 and not found[0] & found[1]
    assert sorted(found[0] | found[1]) == [0, 1, 2, 3, 4]
    for part in parts:  # each is weighted as if its trajectories had one row
        weights = token_weights(part, "sequence")
        assert weights.sum() == pytest.approx(1.0)


def test_row_does_not_see_other_rows_of_its_trajectory() -> None:
    batch, engine = batch_of(split=True), SingleDevice(tiny("qwen2"), TrainSettings())
    alone = [engine.logprobs(select_rows(batch, np.array([row]))) for row in range(batch.num_rows)]
    assert np.allclose(np.concatenate(alone), engine.logprobs(batch), atol=1e-5)


def test_metrics_count_trajectory_once() -> None:
    whole, split = groups(split=False), groups(split=True)
    one, many = measure(whole, assemble(whole)), measure(split, assemble(split))
    assert many["rollout/samples"] == 9 and one["rollout/samples"] == 5
    assert many["rollout/trajectories"] == one["rollout/trajectories"] == 5
    assert many["episode/splits_mean"] == pytest.approx(4 / 5) and not one["episode/splits_mean"]
    changed = {"rollout/samples", "episode/splits_mean"}
    assert {n: v for n, v in one.items() if n not in changed} == {
        n: v for n, v in many.items() if n not in changed
    }
    assert mean_reward(assemble(split)) == pytest.approx(mean_reward(assemble(whole)))
    assert row_lengths(split) == assemble(split).lengths.tolist()


def test_rows_of_trajectories_are_single_when_none_is_split() -> None:
    batch = assemble(groups(split=False))
    assert [rows.tolist() for rows in rows_of_trajectories(batch)] == [[n] for n in range(5)]


def test_agents_are_compared_with_same_agent_only() -> None:
    def acted(agent: str, reward: float) -> Trajectory:
        return replace(conversation(reward, (2, 0.0), split=False), agent=agent)

    episodes = (acted("a", 1.0), acted("b", 10.0), acted("a", 0.0), acted("b", 10.0))
    group = Group(0, Prompt("p", (1, 2), "", {}), episodes, 0.0, 0.0)
    batch = assemble([group, replace(group, seq=1)])
    assert batch.groups.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    done = advantages(batch, AlgorithmSettings(normalize="none"))
    assert done.advantages is not None
    assert done.advantages[batch.mask].tolist() == [0.5, 0.5, 0, 0, -0.5, -0.5, 0, 0] * 2
    assert not equal_rewards(group)
    assert equal_rewards(replace(group, trajectories=(episodes[0], episodes[1])))
