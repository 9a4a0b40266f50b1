"""The real loop in virtual time when something never ends: deadlines, and what a stall names."""

import asyncio

import pytest

from paceline.errors import RolloutError, StalledError
from paceline.rollout.environment import Generate
from paceline.types import Prompt, Trajectory
from tests.fakes import World
from tests.fault_report import Fault
from tests.torture.test_loop import MODES
from tests.virtual import run_virtual


@pytest.mark.fault("B7", "comparison of weights never ends")
def test_run_continues_when_weight_check_never_ends(fault: Fault) -> None:
    async def never(*_: object) -> None:
        fault.fired()
        await asyncio.sleep(1e9)

    world = World(schedule=MODES["async swap"], check_weights=never)
    run_virtual(world.build().run())
    assert len(world.trainer.steps) == world.steps


def test_run_fails_when_generation_times_out() -> None:
    with pytest.raises(RolloutError, match=r"generation_timeout = 0\.5"):
        run_virtual(World(generation_timeout=0.5, engine_s=5.0).build().run())


@pytest.mark.fault("B8", "completions exceed the generation timeout")
def test_group_is_dropped_when_generation_times_out(fault: Fault) -> None:
    world = World(generation_timeout=4.0, engine_s=1.0, max_failed_groups=10_000)
    run_virtual(world.build().run())
    assert world.ledger.dropped["rollout_failed"] > 0
    fault.fired()
    assert all(
        len(t.turns[0].completion) for group in world.observer.groups for t in group.trajectories
    )


@pytest.mark.fault("B7", "train step never ends")
def test_stall_error_names_what_run_waits_for(fault: Fault) -> None:
    async def scenario() -> None:
        world = World(stall_timeout_s=60)
        loop = world.build()

        async def never(*_: object) -> dict[str, float]:
            await asyncio.sleep(1e9)
            return {}

        world.trainer.step = never  # type: ignore[method-assign]
        await loop.run()

    with pytest.raises(
        StalledError,
        match=r"no progress for 6\d s \(stall_timeout_s = 60\): "
        ".*train waits for train step 1",
    ):
        run_virtual(scenario())
    fault.fired()


def test_train_step_may_take_as_long_as_step_timeout() -> None:
    async def scenario(seconds: float) -> None:
        world = World(stall_timeout_s=60, step_timeout_s=400, steps=2)
        loop = world.build()

        async def slow(*_: object) -> dict[str, float]:
            await asyncio.sleep(seconds)
            return {}

        world.trainer.step = slow  # type: ignore[method-assign]
        await loop.run()

    run_virtual(scenario(300))
    with pytest.raises(
        StalledError, match=r"\(step_timeout_s = 400\): .*train waits for train step 1"
    ):
        run_virtual(scenario(500))


@pytest.mark.fault("B7", "scoring never ends")
def test_stall_error_names_reward_when_it_hangs(fault: Fault) -> None:
    async def never(*_: object) -> list[float]:
        await asyncio.sleep(1e9)
        return []

    async def scenario() -> None:
        world = World(stall_timeout_s=60)
        loop = world.build()
        world.reward.score = never  # type: ignore[method-assign]
        await loop.run()

    with pytest.raises(
        StalledError,
        match=r"train waits for groups \[0, 1, 2\] .*; 3 group\(s\) are being scored by the reward",
    ):
        run_virtual(scenario())
    fault.fired()


@pytest.mark.fault("B7", "one engine is suspended, another dies, and none can be started")
def test_stall_error_names_workers_that_are_missing(fault: Fault) -> None:
    async def scenario() -> None:
        world = World(stall_timeout_s=60, num_engines=2, elastic=True, start_s=1e4)
        loop = world.build()
        world.engines[0].freeze()
        world.engines[1].die()
        await loop.run()

    with pytest.raises(
        StalledError,
        match=r"3 group\(s\) are being generated \(group 0 for 6\d s\); "
        "worker 'rollout-0' is being started; worker 'rollout-1' is being started",
    ):
        run_virtual(scenario())
    fault.fired()


class Endless:
    """Environment that generates turn after turn."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        while True:
            await generate(prompt.tokens)


@pytest.mark.fault("B6", "environment never ends its episode")
def test_endless_episode_fails_at_its_deadline(fault: Fault) -> None:
    world = World(environment=Endless(), episode_timeout_s=100, stall_timeout_s=1e4)
    with pytest.raises(RolloutError, match=r"rollout.episode_timeout_s = 100 s"):
        run_virtual(world.build().run(), limit_s=150)
    fault.fired()


def test_episode_deadline_excludes_paused_time() -> None:
    async def scenario() -> None:
        world = World(schedule=MODES["async swap"], episode_timeout_s=100)
        loop = world.build()
        running = asyncio.ensure_future(loop.run())
        await asyncio.sleep(1)
        await world.rollouter.pause_rollout()
        assert world.engines[0].running, "no episode is open during the pause"
        await asyncio.sleep(1000)
        await world.rollouter.resume_rollout()
        await running

    run_virtual(scenario())


def test_stall_is_reported_before_the_run_ends() -> None:
    def report(problem: str) -> StalledError:
        return StalledError(f"{problem}; and the stacks")

    world = World(stall_timeout_s=60, report_stall=report)
    loop = world.build()
    world.engines[0].freeze()
    with pytest.raises(StalledError, match=r"no progress for 6\d s .*; and the stacks"):
        run_virtual(loop.run())
