"""Selection of groups: dynamic sampling, groups without late trajectories, greedy baselines."""

import random
from dataclasses import replace

import numpy as np
import pytest

from paceline.errors import RolloutError
from paceline.rollout.environment import Generate, SingleTurn
from paceline.types import Completion, Prompt, Request, Trajectory
from tests.fakes import FakeEngine, FakeSource, World
from tests.fault_report import Fault
from tests.torture.test_loop import MODES, random_world, staleness_in_data
from tests.virtual import run_virtual


def half_equal(prompt: Prompt) -> list[float]:
    """Give about half of the prompts equal rewards."""
    return [1.0] * 5 if random.Random(prompt.uid).random() < 0.5 else [0.0, 1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_dynamic_sampling_fills_batches_with_unequal_rewards(mode: str) -> None:
    for seed in range(60):
        world = random_world(seed, MODES[mode])
        world.group_size, world.score, world.dynamic_sampling = 2, half_equal, True
        run_virtual(world.build().run())
        sizes = [batch.num_rows for batch in world.trainer.batches]
        assert sizes == [2 * world.groups_per_step] * world.steps
        assert all(
            group.trajectories[0].reward != group.trajectories[1].reward
            for group in world.observer.groups
        )
        assert max(staleness_in_data(world)) <= world.schedule.max_staleness
        counts = world.ledger.counts()
        assert counts["dropped"]["equal_rewards"] > 0
        settled = counts["trained"] + counts["dropped"]["equal_rewards"]
        assert counts["issued"] == settled + counts["outstanding"]


class TurnRewards(SingleTurn):
    """Rewards each turn with its number of tokens."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        trajectory = await super().run(prompt, generate)
        turn = replace(trajectory.turns[0], reward=float(trajectory.num_tokens))
        return replace(trajectory, turns=(turn,))


def test_turn_rewards_count_in_dynamic_sampling_and_metrics() -> None:
    world = World(
        dynamic_sampling=True, score=lambda _: [0.0] * 5, group_size=4, environment=TurnRewards(str)
    )
    run_virtual(world.build().run())
    assert len(world.trainer.batches) == world.steps
    lengths = [t.num_tokens for group in world.observer.groups for t in group.trajectories]
    assert np.isclose(
        np.mean([row["reward/mean"] for row in world.observer.rows]), np.mean(lengths)
    )
    assert all(row["reward/uniform_group_fraction"] == 0 for row in world.observer.rows)


@pytest.mark.fault("D6", "all rewards are equal, and groups with equal rewards are filtered")
def test_dynamic_sampling_fails_when_all_rewards_are_equal(fault: Fault) -> None:
    world = World(dynamic_sampling=True, score=lambda _: [0.0] * 5)
    with pytest.raises(RolloutError, match=r"151 with reward 0.*too hard or too easy"):
        run_virtual(world.build().run())
    fault.fired()


def test_dynamic_sampling_continues_when_equal_rewards_are_not_in_a_row() -> None:
    world = World(dynamic_sampling=True, score=half_equal, groups_per_step=1, steps=150)
    run_virtual(world.build().run())
    assert world.ledger.dropped["equal_rewards"] > 50, "the limit is 50 batches in a row"


@pytest.mark.fault("B8", "one completion of a group is late")
def test_group_continues_without_late_trajectories_down_to_min_size(fault: Fault) -> None:
    sizes = []
    for seed in range(20):
        world = World(
            seed=seed,
            group_size=4,
            min_group_size=2,
            generation_timeout=6.0,
            max_failed_groups=10_000,
        )
        run_virtual(world.build().run())
        sizes += [len(group.trajectories) for group in world.observer.groups]
        assert all(len(batch.groups) == len(batch.rewards) for batch in world.trainer.batches)
    assert set(sizes) == {2, 3, 4}
    fault.fired()


def test_greedy_completion_is_baseline_and_not_trained() -> None:
    world = World(group_size=2, greedy_baseline=True, score=lambda _: [0.25, 0.5, 0.75])
    run_virtual(world.build().run())
    for batch in world.trainer.batches:
        assert batch.num_rows == 6 and batch.baselines is not None
        assert batch.baselines.tolist() == [0.75] * 6 and batch.rewards.tolist() == [0.25, 0.5] * 3


class NeverGreedy(FakeEngine):
    async def _produce(self, request: Request) -> Completion:
        if request.sampling.temperature == 0:
            raise RolloutError("planted")
        return await super()._produce(request)


def test_group_fails_when_its_greedy_completion_fails() -> None:
    world = World(group_size=3, min_group_size=2, greedy_baseline=True, make_engine=NeverGreedy)
    with pytest.raises(RolloutError, match="planted"):
        run_virtual(world.build().run())


def test_evaluation_has_no_greedy_baseline() -> None:
    async def scenario() -> None:
        world = World(greedy_baseline=True)
        world.build()
        group = await world.rollouter.variant(0.0, 2).run(0, FakeSource()[0])
        assert len(group.trajectories) == len(world.engines[0].seen) == 2

    run_virtual(scenario())


def test_baseline_includes_turn_rewards() -> None:
    world = World(
        group_size=2,
        greedy_baseline=True,
        score=lambda _: [0.25, 0.5, 0.75],
        environment=TurnRewards(str),
    )
    run_virtual(world.build().run())
    assert all(
        batch.baselines is not None and batch.baselines.min() >= 1.75
        for batch in world.trainer.batches
    )


def test_dynamic_sampling_filters_groups_whose_rewards_differ_by_rounding() -> None:
    def score(prompt: Prompt) -> list[float]:
        return [0.3, 0.1 + 0.2] if random.Random(prompt.uid).random() < 0.5 else [0.0, 1.0]

    world = World(dynamic_sampling=True, score=score, group_size=2)
    run_virtual(world.build().run())
    assert world.ledger.counts()["dropped"]["equal_rewards"] > 0
    assert {t.reward for group in world.observer.groups for t in group.trajectories} == {0.0, 1.0}
