"""Which groups are trained: dynamic sampling, groups that go on without a late attempt, greedy baselines."""

import random
from dataclasses import replace

import numpy as np
import pytest

from paceline.errors import RolloutError
from paceline.rollout.environment import Generate, SingleTurn
from paceline.types import Prompt, Trajectory
from tests.fakes import World
from tests.torture.test_loop import MODES, random_world, staleness_in_data
from tests.virtual import run_virtual


def half_equal(prompt: Prompt) -> list[float]:
    """Every second prompt is one that all attempts solve or all fail."""
    return [1.0] * 5 if random.Random(prompt.uid).random() < 0.5 else [0.0, 1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_dynamic_sampling_fills_every_batch_exactly_with_groups_that_teach(mode: str) -> None:
    for seed in range(60):
        world = random_world(seed, MODES[mode])
        world.group_size, world.score, world.dynamic_sampling = 2, half_equal, True
        run_virtual(world.build().run())
        assert [batch.num_rows for batch in world.trainer.batches] == [
            2 * world.groups_per_step
        ] * world.steps
        assert all(
            group.trajectories[0].reward != group.trajectories[1].reward
            for group in world.notes.groups
        )
        assert max(staleness_in_data(world)) <= world.schedule.max_staleness
        counts = world.ledger.counts()
        assert counts["dropped"]["equal_rewards"] > 0
        assert (
            counts["issued"]
            == counts["trained"] + counts["dropped"]["equal_rewards"] + counts["outstanding"]
        )


class PaidByTurn(SingleTurn):
    """Every attempt is paid for its turn, by how many words it has."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        attempt = await super().run(prompt, generate)
        return replace(
            attempt, turns=(replace(attempt.turns[0], reward=float(attempt.num_tokens)),)
        )


def test_rewards_of_turns_count_when_groups_are_compared_and_in_the_figures() -> None:
    world = World(
        dynamic_sampling=True, score=lambda _: [0.0] * 5, group_size=4, environment=PaidByTurn(str)
    )
    run_virtual(world.build().run())
    assert len(world.trainer.batches) == world.steps
    lengths = [attempt.num_tokens for group in world.notes.groups for attempt in group.trajectories]
    assert np.isclose(np.mean([row["reward/mean"] for row in world.notes.rows]), np.mean(lengths))
    assert all(row["reward/uniform_group_fraction"] == 0 for row in world.notes.rows)


def test_when_no_group_ever_teaches_the_run_ends_and_shows_the_rewards() -> None:
    world = World(dynamic_sampling=True, score=lambda _: [0.0] * 5)
    with pytest.raises(RolloutError, match=r"151 with reward 0.*too hard, too easy"):
        run_virtual(world.build().run())


def test_a_group_goes_on_without_its_late_attempts_down_to_the_smallest_size_allowed() -> None:
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
        sizes += [len(group.trajectories) for group in world.notes.groups]
        assert all(len(batch.groups) == len(batch.rewards) for batch in world.trainer.batches)
    assert set(sizes) == {2, 3, 4}


def test_the_greedy_answer_is_the_baseline_and_is_not_trained_on() -> None:
    world = World(group_size=2, greedy_baseline=True, score=lambda _: [0.25, 0.5, 0.75])
    run_virtual(world.build().run())
    for batch in world.trainer.batches:
        assert batch.num_rows == 6 and batch.baselines is not None
        assert batch.baselines.tolist() == [0.75] * 6 and batch.rewards.tolist() == [0.25, 0.5] * 3


def test_the_greedy_answer_is_worth_what_its_turns_were_paid_too() -> None:
    world = World(
        group_size=2,
        greedy_baseline=True,
        score=lambda _: [0.25, 0.5, 0.75],
        environment=PaidByTurn(str),
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
    assert {t.reward for group in world.notes.groups for t in group.trajectories} == {0.0, 1.0}
