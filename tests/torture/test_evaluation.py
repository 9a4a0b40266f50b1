"""Evaluations in the real loop with random latencies, in virtual time.

The value of a fake token is the version that generated it, so an evaluation shows which weights it
used.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data.held_out import EvaluationSettings
from paceline.held_out import HeldOut, Scores
from paceline.types import Prompt
from tests.fakes import FakeSource, World
from tests.torture.test_loop import MODES, SharedWeightsEngine, random_world, staleness_in_data
from tests.virtual import run_virtual


class Held:
    """Five held-out prompts."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, seq: int) -> Prompt:
        return FakeSource()[seq]


class Watched(HeldOut):
    """Records each evaluation, and how many train steps were made while it ran."""

    def __init__(self, world: World, folder: Path, first_step: int = 0, **settings: Any) -> None:
        self.results: list[tuple[int, Scores]] = []
        self.steps_meanwhile: list[int] = []
        self._world = world
        super().__init__(
            EvaluationSettings(**settings),
            Held(),
            world.rollouter.variant(0.0, 2),
            folder,
            first_step=first_step,
            last_step=world.steps,
            slots=4,
            report=lambda step, scores: self.results.append((step, scores)),
        )

    async def run(self, step: int) -> None:
        before = len(self._world.trainer.steps)
        await super().run(step)  # raises if a token has another version
        self.steps_meanwhile.append(len(self._world.trainer.steps) - before)


def watched(world: World, folder: Path, **settings: Any) -> Watched:
    made: list[Watched] = []

    def make(world: World) -> Watched:
        made.append(Watched(world, folder, **settings))
        return made[0]

    world.make_evaluations = make
    world.build()
    return made[0]


@pytest.mark.parametrize("mode", MODES)
def test_one_version_generates_each_evaluation_and_training_keeps_its_bound(
    mode: str, tmp_path: Path
) -> None:
    for seed in range(60):
        world = random_world(seed, MODES[mode])
        world.steps = 8
        held_out = watched(world, tmp_path / str(seed), every=3, keep_best=False)
        (tmp_path / str(seed)).mkdir()
        run_virtual(world.loop.run())
        steps = [step for step, _ in held_out.results]
        assert steps[0] == 0 and steps[-1] == 8 and steps == sorted(set(steps))
        assert max(staleness_in_data(world)) <= world.schedule.max_staleness
        seqs = [group.seq for group in world.observer.groups]
        assert seqs == list(range(world.steps * world.groups_per_step)), f"seed {seed}"
        world.ledger.check()


@pytest.mark.parametrize("mode", ["sync", "one step off", "async swap", "async interrupt"])
def test_one_version_generates_each_evaluation_when_weights_are_shared(
    mode: str, tmp_path: Path
) -> None:
    for seed in range(60):
        world = random_world(seed, MODES[mode])
        world.make_engine, world.num_engines, world.takes_turns = SharedWeightsEngine, 1, True
        (tmp_path / str(seed)).mkdir()
        held_out = watched(world, tmp_path / str(seed), every=2, keep_best=False)
        world.engines[0].trained = world.trainer.steps  # type: ignore[attr-defined]
        run_virtual(world.loop.run())
        assert [step for step, _ in held_out.results] == [0, 2, 4, 6]
        assert held_out.steps_meanwhile == [0, 0, 0, 0]


def test_async_trainer_continues_during_evaluation(tmp_path: Path) -> None:
    world = World(schedule=MODES["async swap"], steps=12, engine_s=1.0, train_s=0.01)
    held_out = watched(world, tmp_path, every=4, keep_best=False)
    run_virtual(world.loop.run())
    assert max(held_out.steps_meanwhile) >= 2


def test_last_sync_time_excludes_wait_for_evaluation(tmp_path: Path) -> None:
    world = World(schedule=MODES["async swap"], steps=1, engine_s=1.0, train_s=0.01)
    watched(world, tmp_path, every=1, keep_best=False)
    run_virtual(world.loop.run())
    (times,) = world.observer.rows
    assert times["time/sync_s"] < 1 < times["time/evaluate_s"]


def test_run_ends_when_target_is_reached_or_nothing_improves(tmp_path: Path) -> None:
    for settings in ({"target": -1.0}, {"patience": 1}):
        folder = tmp_path / next(iter(settings))
        folder.mkdir()
        world = World(steps=20)
        held_out = watched(world, folder, every=2, keep_best=False, **settings)
        run_virtual(world.loop.run())
        assert world.loop.step < 20 and world.saves == [world.loop.step]
        assert len(held_out.results) == (1 if "target" in settings else 2)


def test_every_evaluated_version_is_saved_and_protected_if_best_is_kept(tmp_path: Path) -> None:
    world = World(steps=6)
    held_out = watched(world, tmp_path, every=2)
    run_virtual(world.loop.run())
    assert world.saves == [2, 4, 6]
    rewards = [scores["reward"] for _, scores in held_out.results]
    assert held_out.protected == {[0, 2, 4, 6][int(np.argmax(rewards))]}


def test_resumed_run_forgets_later_evaluations_and_repeats_none(tmp_path: Path) -> None:
    world = World(steps=6)
    watched(world, tmp_path, every=2, keep_best=False)
    run_virtual(world.loop.run())
    again = World(steps=8)
    held_out = watched(again, tmp_path, every=2, keep_best=False, first_step=4)
    again.synchronizer.version = 4
    assert not held_out.due(4) and held_out.due(6)
    assert [line["step"] for line in held_out._done] == [0, 2, 4]


def test_resumed_run_forgets_best_version_that_it_makes_again(tmp_path: Path) -> None:
    """The newest checkpoint was damaged, so the run resumes from the one before it."""
    world = World(steps=6)
    watched(world, tmp_path, every=2)
    run_virtual(world.loop.run())
    link = tmp_path / "checkpoints" / "best"
    (link.parent / "step_00000006").mkdir(parents=True)
    for first_step, is_kept in ((6, True), (4, False)):
        link.unlink(missing_ok=True)
        link.symlink_to("step_00000006")
        watched(World(steps=8), tmp_path, every=2, first_step=first_step)
        assert link.is_symlink() == is_kept


def test_sync_that_waited_for_evaluation_may_take_as_long_as_a_step(tmp_path: Path) -> None:
    world = random_world(2, MODES["async swap"])
    world.steps, world.stall_timeout_s, world.step_timeout_s = 4, 60, 400
    held_out = watched(world, tmp_path, every=1, keep_best=False)
    sync = world.synchronizer.sync_weights

    async def slow(version: int) -> Any:
        await asyncio.sleep(200)
        return await sync(version)

    world.synchronizer.sync_weights = slow  # type: ignore[method-assign]
    run_virtual(world.loop.run())
    assert any(held_out.steps_meanwhile), "no sync waited for an evaluation"


@pytest.mark.parametrize("mode", MODES)
def test_run_may_wait_for_groups_after_sync_longer_than_stall_timeout(
    mode: str, tmp_path: Path
) -> None:
    """The engines had no work during the sync, and the first completion takes some seconds."""
    world = World(schedule=MODES[mode], steps=4, engine_s=5.0, train_s=0.01)
    world.stall_timeout_s, world.step_timeout_s = 60, 400
    watched(world, tmp_path, every=1, keep_best=False)
    sync = world.synchronizer.sync_weights

    async def slow(version: int) -> Any:
        await asyncio.sleep(200)
        return await sync(version)

    world.synchronizer.sync_weights = slow  # type: ignore[method-assign]
    run_virtual(world.loop.run())
    assert world.loop.step == 4
