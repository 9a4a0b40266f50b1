"""The real loop in virtual time while one prompt kills every engine that generates it."""

import asyncio
from pathlib import Path

import pytest

from paceline.errors import WorkerDied
from paceline.rollout.quarantine import Quarantine
from paceline.types import Completion, Request
from tests.fakes import FakeEngine, World
from tests.fault_report import Fault
from tests.torture.test_fleet import play
from tests.torture.test_loop import MODES


class PromptSensitive(FakeEngine):
    """Engine that prompt 4 kills, together with whatever else it generates then."""

    async def _produce(self, request: Request) -> Completion:
        if request.prompt == (4,):
            await asyncio.sleep(0.5)
            self.die()
        return await super()._produce(request)


@pytest.mark.parametrize("num_engines", [1, 2, 5])
@pytest.mark.fault("D7", "one prompt kills its engine, {num_engines} engines")
def test_only_prompt_that_kills_engines_is_quarantined(num_engines: int, fault: Fault) -> None:
    for seed in range(4):
        world = World(
            seed=seed,
            schedule=MODES["async swap"],
            num_engines=num_engines,
            elastic=True,
            steps=30,
            groups_per_step=8,
            make_engine=PromptSensitive,
        )
        play(world, lambda _: asyncio.sleep(0))
        assert world.ledger.dropped == {"quarantined": 1}
        seqs = [group.seq for group in world.observer.groups]
        assert seqs == [seq for seq in range(30 * 8 + 1) if seq != 4], f"seed {seed}"
        assert world.fleet.replaced == 3
        fault.fired()
        fault.counted(lost=0, twice=0)


@pytest.mark.fault("D7", "one prompt kills its engine, then the run is resumed")
def test_quarantined_prompt_is_not_met_again_by_resumed_run(tmp_path: Path, fault: Fault) -> None:
    path, replaced = tmp_path / "quarantine.jsonl", []
    for _ in range(2):
        world = World(
            schedule=MODES["async swap"],
            num_engines=2,
            elastic=True,
            make_engine=PromptSensitive,
            quarantine=Quarantine(path),
        )
        play(world, lambda _: asyncio.sleep(0))
        assert world.ledger.dropped == {"quarantined": 1}
        replaced.append(world.fleet.replaced)
    assert replaced == [3, 0]
    fault.fired()


@pytest.mark.fault("D7", "one prompt kills the only engine, and with it the run")
def test_prompt_is_found_when_each_death_ends_run(tmp_path: Path, fault: Fault) -> None:
    path, died = tmp_path / "quarantine.jsonl", 0
    for _ in range(4):
        world = World(make_engine=PromptSensitive, quarantine=Quarantine(path))
        try:
            play(world, lambda _: asyncio.sleep(0))
        except WorkerDied:
            died += 1
    assert died == 3 and world.ledger.dropped == {"quarantined": 1}
    fault.fired()


@pytest.mark.fault("A11", "five engines die together")
def test_prompt_is_not_blamed_when_engines_die_together(fault: Fault) -> None:
    class SilentlyDying(FakeEngine):
        """Engine whose death is noticed only when it is called."""

        dead = False

        def _check(self) -> None:
            if self.dead:
                self.die()
            super()._check()

    async def script(world: World) -> None:
        await asyncio.sleep(3.3)  # between two heartbeats
        for engine in world.engines:
            engine.dead = True  # type: ignore[attr-defined]
        world.engines[0].die()  # the first death that is noticed

    world = World(
        schedule=MODES["async swap"],
        num_engines=5,
        elastic=True,
        steps=30,
        groups_per_step=10,
        make_engine=SilentlyDying,
    )
    play(world, script)
    assert world.fleet.replaced == 5 and not world.ledger.dropped
    fault.fired()
    assert [group.seq for group in world.observer.groups] == list(range(30 * 10))
    fault.counted(lost=0, twice=0)
