"""The real loop in virtual time: which engine gets a prompt, and when a second one helps."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.rollout.engine import EngineStats
from paceline.rollout.environment import Generate
from paceline.rollout.member import Member, State
from paceline.rollout.router import EngineAssignment, Router
from paceline.types import Completion, Finish, Prompt, Request, Sampling, Trajectory, Turn
from tests.fakes import FakeEngine, World
from tests.fault_report import Fault
from tests.torture.test_fleet import play
from tests.torture.test_loop import MODES
from tests.virtual import run_virtual


class _Engine:
    """An engine that lives."""

    def __init__(self) -> None:
        self.worker = SimpleNamespace(died=asyncio.get_running_loop().create_future())


@pytest.mark.fault("B8", "engine suspended for less than its deadline")
def test_late_completion_is_hedged_on_second_engine(fault: Fault) -> None:
    async def script(world: World) -> None:
        await asyncio.sleep(3)
        world.engines[0].freeze()  # for less than the heartbeat timeout
        fault.fired()
        await asyncio.sleep(15)
        assert any(request_id.endswith("+") for request_id in world.engines[1].seen)
        world.engines[0].thaw()

    world = World(
        schedule=MODES["async swap"],
        num_engines=2,
        elastic=True,
        steps=20,
        hedge_after_s=5.0,
        heartbeat_timeout_s=60,
    )
    play(world, script)
    assert [group.seq for group in world.observer.groups] == list(range(20 * 3))
    fault.counted(lost=0, twice=0)
    assert not world.ledger.dropped
    assert world.fleet.replaced == 0


def test_prompts_go_to_least_loaded_engine_and_groups_stay_together() -> None:
    async def script(world: World) -> None:
        await asyncio.sleep(0.001)
        assert [member.load for member in world.fleet] == [4 * 4, 4 * 4]
        engine_of = {
            request_id.split(".")[0]: number
            for number, engine in enumerate(world.engines)
            for request_id in engine.running
        }
        assert [engine_of[str(seq)] for seq in range(8)] == [0, 1] * 4
        assert all(len(engine.running) == 16 for engine in world.engines)

    play(
        World(schedule=MODES["one step off"], num_engines=2, groups_per_step=4, group_size=4),
        script,
    )


@pytest.mark.parametrize(
    ("stats", "loads", "chosen"),
    [
        ([(8, 0.0), (4, 0.0)], (4, 3), "a"),
        ([(8, 0.99), (8, 0.1)], (1, 5), "b"),
        ([(8, 0.1), (8, 0.99)], (5, 0), "b"),
    ],
    ids=["fewest per slot", "KV cache full", "KV cache full of kept contexts"],
)
def test_prompt_goes_to_engine_with_room_for_it(
    stats: list[tuple[int, float]], loads: tuple[int, int], chosen: str
) -> None:
    async def scenario() -> str:
        members = [Member(name, number, _Engine()) for number, name in enumerate("ab")]  # type: ignore[arg-type]
        for member, load, (slots, kv_used) in zip(members, loads, stats, strict=True):
            member.load = load
            member.stats = EngineStats(0, load, 0, 0, 0.0, False, slots, kv_used)
        found = Router(members).choose()
        assert found
        return found.name

    assert asyncio.run(scenario()) == chosen


def test_longer_of_two_interrupted_completions_counts_when_hedged() -> None:
    class Interrupted(_Engine):
        def __init__(self, after_s: float, tokens: int) -> None:
            super().__init__()
            self._after_s, self._tokens = after_s, tokens

        async def generate(self, request: Request) -> Completion:
            await asyncio.sleep(self._after_s)
            made = np.zeros(self._tokens, np.int32)
            return Completion(made, made.astype(np.float32), made, Finish.INTERRUPT)

    async def scenario() -> Completion:
        engines = [Interrupted(10, 5), Interrupted(8, 2)]
        members = [Member(str(number), number, each) for number, each in enumerate(engines)]  # type: ignore[arg-type]
        assignment = EngineAssignment(Router(members, hedge_after_s=5), [0], "p")
        assert assignment.assign()
        return await assignment.generate(Request("r", (1,), 0, Sampling(9)))

    assert len(run_virtual(scenario())) == 5


def test_later_turns_go_to_engine_of_first_turn() -> None:
    """That engine may have kept the KV cache of the earlier turns."""

    class ThreeTurns:
        async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
            turns: tuple[Turn, ...] = ()
            context = prompt.tokens
            for _ in range(3):
                completion = await generate(context)
                turns += (Turn(context if not turns else (1,), completion),)
                context = (*context, *completion.tokens.tolist(), 1)
                await asyncio.sleep(0.5)  # the loads of the engines change meanwhile
            return Trajectory(turns, "")

    world = World(schedule=MODES["async swap"], num_engines=2, steps=20, environment=ThreeTurns())
    play(world, lambda _: asyncio.sleep(0))
    groups = [{request_id.split(".")[0] for request_id in e.seen} for e in world.engines]
    assert all(groups) and not groups[0] & groups[1]


def test_prompts_wait_without_timeout_when_engine_slots_are_full() -> None:
    loads: list[int] = []

    class Slotted(FakeEngine):
        async def _produce(self, request: Request) -> Completion:
            loads.append(len(self.running))
            return await super()._produce(request)

    world = World(
        schedule=MODES["async swap"],
        elastic=True,
        steps=2,
        groups_per_step=100,
        group_size=4,
        make_engine=Slotted,
    )
    world.slots, world.generation_timeout = 8, 200.0
    play(world, lambda _: asyncio.sleep(0))
    assert max(loads) < 2 * 8 + 4, "at most twice the slots, plus the rest of a group"
    assert [group.seq for group in world.observer.groups] == list(range(2 * 100))
    assert not world.ledger.dropped
    assert max(group.finished_s - group.started_s for group in world.observer.groups) > 200, (
        "some groups must wait for longer than the generation timeout"
    )


def test_all_waiting_turns_follow_their_prompt_to_another_engine() -> None:
    async def waiting() -> None:
        lost, full = (Member(name, number, _Engine()) for number, name in enumerate("ab"))  # type: ignore[arg-type]
        router = Router([lost, full], max_load=2)
        prompt = EngineAssignment(router, [0, 1], "p")
        assert prompt.assign() and prompt.member is lost
        for trajectory in (0, 1):  # both have ended their first turn
            prompt.use_reserved(trajectory)
            prompt.give_up_place()
        lost.state, full.load = State.DEAD, 2
        turns = [asyncio.create_task(router.wait(prompt, prompt.take_place)) for _ in range(2)]
        await asyncio.sleep(0)
        full.load = 0
        router.recheck(full)
        async with asyncio.timeout(60):
            await asyncio.gather(*turns)
        assert (prompt.member, full.load, full.reserved) == (full, 2, 0)

    asyncio.run(waiting())
