"""The real loop in virtual time: pausing, resuming and stopping it."""

import asyncio
from collections.abc import Callable

import pytest

from paceline.errors import RolloutError
from paceline.types import OnSync
from tests.fakes import SteadyEngine, World
from tests.torture.test_loop import MODES, staleness_in_data
from tests.virtual import run_virtual


@pytest.mark.parametrize("mode", MODES)
def test_pause_stops_generation_until_resume(mode: str) -> None:
    async def scenario() -> World:
        world = World(schedule=MODES[mode], steps=8)
        run = asyncio.create_task(world.build().run())
        await asyncio.sleep(3)
        assert await world.rollouter.pause_rollout() is True
        assert await world.rollouter.pause_rollout() is True
        issued, tokens = world.ledger.issued, world.engines[0].tokens
        await asyncio.sleep(500)
        assert (world.ledger.issued, world.engines[0].tokens) == (issued, tokens), (
            "something was generated while paused"
        )
        assert not run.done()
        if world.schedule.on_sync is not OnSync.SWAP:
            assert not world.engines[0].running
        assert await world.rollouter.resume_rollout() is True
        assert await world.rollouter.resume_rollout() is True
        await run
        return world

    world = run_virtual(scenario())
    assert max(staleness_in_data(world)) <= world.schedule.max_staleness
    assert [g.seq for g in world.observer.groups] == list(range(8 * 3))


def test_generation_stays_paused_until_every_caller_resumes() -> None:
    async def scenario() -> None:
        world = World(schedule=MODES["async swap"])
        run = asyncio.create_task(world.build().run())
        await asyncio.sleep(3)
        await world.rollouter.pause_rollout("one")
        await world.rollouter.pause_rollout("other")
        await world.rollouter.resume_rollout("one")
        assert (await world.engines[0].stats()).paused
        await world.rollouter.resume_rollout("other")
        assert not (await world.engines[0].stats()).paused
        await run

    run_virtual(scenario())


def test_generation_timeout_excludes_paused_time() -> None:
    async def scenario() -> World:
        world = World(schedule=MODES["async swap"], generation_timeout=300)
        run = asyncio.create_task(world.build().run())
        await asyncio.sleep(2)
        await world.rollouter.pause_rollout()
        await asyncio.sleep(10_000)
        await world.rollouter.resume_rollout()
        await run
        return world

    world = run_virtual(scenario())
    assert len(world.observer.groups) == world.steps * world.groups_per_step
    assert not world.ledger.dropped


def test_generation_timeout_includes_time_before_interruptions() -> None:
    async def scenario() -> None:
        world = World(schedule=MODES["async interrupt"], generation_timeout=100, engine_s=10)
        world.make_engine = SteadyEngine
        run = asyncio.create_task(world.build().run())
        while not run.done():
            await asyncio.sleep(30)
            await world.rollouter.pause_rollout()
            await world.rollouter.resume_rollout()
        await run

    with pytest.raises(RolloutError, match=r"took longer than rollout\.generation_timeout = 100 s"):
        run_virtual(scenario())


def test_deadlines_stay_when_resumed_while_draining() -> None:
    async def scenario() -> None:
        world = World(schedule=MODES["one step off"], generation_timeout=300)
        run = asyncio.create_task(world.build().run())
        await asyncio.sleep(2)
        pausing = asyncio.create_task(world.rollouter.pause_rollout())
        await asyncio.sleep(0)
        assert not pausing.done(), "running generations should still drain"
        await world.rollouter.resume_rollout()
        assert await pausing is True
        world.engines[0].freeze()
        await run

    with pytest.raises(RolloutError, match=r"took longer than rollout\.generation_timeout = 300 s"):
        run_virtual(scenario())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("after_s", [0.0, 0.5, 5.0, 20.0, 40.0])
def test_stop_ends_run_after_current_step_with_checkpoint(mode: str, after_s: float) -> None:
    async def scenario() -> World:
        world = World(schedule=MODES[mode], steps=1000)
        loop = world.build()
        run = asyncio.create_task(loop.run())
        await asyncio.sleep(after_s)
        step = loop.step
        loop.stop()
        await run
        assert loop.step <= step + 1, "a new step was started"
        assert world.saves == ([loop.step] if loop.step else [])
        return world

    world = run_virtual(scenario())
    assert len(world.observer.groups) == 3 * len(world.observer.rows)


def test_final_checkpoint_of_stopped_run_may_take_as_long_as_a_step() -> None:
    saved = []

    async def save(step: int, copied: Callable[[], None] | None) -> None:
        await asyncio.sleep(200)
        saved.append(step)

    async def scenario() -> None:
        world = World(steps=1000, stall_timeout_s=60, step_timeout_s=400, save=save)
        loop = world.build()
        run = asyncio.create_task(loop.run())
        await asyncio.sleep(20)
        loop.stop()
        await run
        assert saved == [loop.step]

    run_virtual(scenario())
