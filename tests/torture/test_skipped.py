"""The real loop while updates are skipped at random, in virtual time."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.errors import NonFiniteError
from paceline.types import Batch
from tests.fakes import FakeTrainer, World
from tests.fault_report import Fault
from tests.torture.test_loop import MODES, random_world, staleness_in_data
from tests.virtual import run_virtual


class BadNumbers(FakeTrainer):
    """A trainer that skips a fraction of the updates."""

    skipped = 0
    fails: Callable[[], bool]

    async def step(self, batch: Batch, step: int) -> dict[str, float]:
        if self.fails():
            self.skipped += 1
            raise NonFiniteError(f"step {step + 1}: planted")
        return await super().step(batch, step)


def build(world: World, fails: Callable[[], bool], limit: int = 1000) -> BadNumbers:
    loop = world.build()
    trainer = BadNumbers(random.Random(world.seed))
    trainer.fails = fails
    world.trainer = trainer
    train = loop._train
    train._settings = train._settings.model_copy(update={"max_skipped_updates": limit})
    train._parts = replace(train._parts, trainer=trainer)
    return trainer


@pytest.mark.parametrize("takes_turns", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.fault("E1", "NaN in 30 % of updates")
def test_group_is_trained_once_or_booked_as_skipped(
    mode: str, takes_turns: bool, fault: Fault
) -> None:
    skipped = 0
    for seed in range(25):
        world = random_world(seed, MODES[mode])
        world.takes_turns = takes_turns
        rng = random.Random(seed)
        trainer = build(world, lambda rng=rng: rng.random() < 0.3)  # type: ignore[misc]
        run_virtual(world.loop.run())
        size, counts = world.groups_per_step, world.ledger.counts()
        assert trainer.steps == list(range(world.steps)), f"seed {seed}"
        assert counts["trained"] == world.steps * size
        assert counts["dropped"].get("update_skipped", 0) == trainer.skipped * size
        assert max(staleness_in_data(world)) <= world.schedule.max_staleness, f"seed {seed}"
        assert len({group.seq for group in world.observer.groups}) == counts["trained"]
        before_last = world.observer.rows[-1]["train/skipped_groups"]
        assert before_last == counts["dropped"].get("update_skipped", 0)
        world.ledger.check()
        skipped += trainer.skipped
    assert skipped > 20
    fault.fired()
    fault.counted(lost=0, twice=0)


@pytest.mark.fault("E1", "NaN in every update")
def test_run_fails_after_skipped_updates_in_a_row(fault: Fault) -> None:
    world = World(steps=50)
    trainer = build(world, lambda: True, limit=4)
    with pytest.raises(NonFiniteError, match=r"4 updates in a row .* the last: step 1: planted"):
        run_virtual(world.loop.run())
    assert trainer.skipped == 4 and world.loop.step == 0
    fault.fired()
    counts = world.ledger.counts()
    assert counts["trained"] == 0
    assert counts["dropped"] == {"update_skipped": 4 * world.groups_per_step}


def test_engine_that_takes_turns_gets_weights_again_after_skipped_update() -> None:
    """It may have freed its own weights for the train step."""
    world = World(steps=4, takes_turns=True)
    turns = itertools.cycle([True, False])
    trainer = build(world, lambda: next(turns))
    run_virtual(world.loop.run())
    assert len(world.synchronizer.seconds) == 4 + trainer.skipped == 8


def test_run_continues_when_skipped_updates_are_not_in_a_row() -> None:
    world = World(steps=50)
    turns = itertools.cycle([False, True])
    trainer = build(world, lambda: next(turns), limit=2)
    run_virtual(world.loop.run())
    assert trainer.skipped == 49 and world.loop.step == 50
