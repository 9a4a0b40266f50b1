"""The real loop while engines die, freeze, fall behind, join and leave at random.

Thousands of seeds run in virtual time.
"""

import asyncio
import random
from collections import Counter

import pytest

from paceline.errors import ConfigError, SyncError, WorkerDied
from paceline.rollout import quarantine
from paceline.rollout.fleet import Fleet
from paceline.rollout.member import Member, State
from paceline.sync.weights import Weights
from tests.fakes import FakeEngine, SteadyEngine, World
from tests.fault_report import Fault
from tests.torture.test_loop import MODES, random_world, staleness_in_data
from tests.virtual import run_virtual


class Nemesis:
    """Disturbs engines at random while the loop runs, and counts its actions."""

    def __init__(self, world: World, rng: random.Random, mean_s: float) -> None:
        self.done: Counter[str] = Counter()
        self._world, self._rng, self._mean_s = world, rng, mean_s

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / self._mean_s))
            act = self._rng.choice(
                [
                    self._kill,
                    self._suspend,
                    self._fail_loads,
                    self._slow_loads,
                    self._add,
                    self._remove,
                    self._pause,
                ]
            )
            if await act():
                self.done[act.__name__] += 1

    def _victim(self) -> FakeEngine | None:
        members = [member for member in self._world.fleet if member.in_rotation]
        return self._rng.choice(members).engine if members else None  # type: ignore[return-value]

    async def _kill(self) -> bool:
        if victim := self._victim():
            victim.die()
        return victim is not None

    async def _suspend(self) -> bool:
        """Suspend an engine and resume it either before the heartbeat timeout or long after."""
        if victim := self._victim():
            victim.freeze()
            asyncio.get_running_loop().call_later(self._rng.choice([2.0, 60.0]), victim.thaw)
        return victim is not None

    async def _fail_loads(self) -> bool:
        if victim := self._victim():
            victim.fail_loads = 1
        return victim is not None

    async def _slow_loads(self) -> bool:
        if victim := self._victim():
            victim.load_s = self._rng.choice([0.1, 3.0, 15.0])
        return victim is not None

    async def _add(self) -> bool:
        if len(list(self._world.fleet)) > 4:
            return False
        await self._world.fleet.add()
        return True

    async def _remove(self) -> bool:
        try:
            await self._world.fleet.remove(
                self._rng.choice([member.name for member in self._world.fleet] or ["none"])
            )
        except ConfigError:
            return False  # no other engine is in rotation
        return True

    async def _pause(self) -> bool:
        await self._world.rollouter.pause_rollout()
        await asyncio.sleep(self._rng.random() * 5)
        await self._world.rollouter.resume_rollout()
        return True


def torture(seed: int, mode: str) -> tuple[World, Nemesis]:
    world = random_world(seed, MODES[mode])
    world.elastic, world.steps, world.max_restarts = True, 12, 1000
    world.start_s, world.heartbeat_timeout_s = 1.0, 8.0
    world.stall_timeout_s, world.generation_timeout = 500.0, 2000.0

    async def scenario() -> Nemesis:
        loop = world.build()
        rng = random.Random(seed)
        nemesis = Nemesis(world, rng, rng.choice([0.5, 3.0, 20.0]) * max(1.0, world.engine_s))
        await world.synchronizer.sync_weights(0)
        disturbing = asyncio.create_task(nemesis.run())
        try:
            await loop.run()
        finally:
            disturbing.cancel()
        return nemesis

    return world, run_virtual(scenario())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.fault("F6", "random faults of engines in 100 runs")
def test_every_prompt_is_trained_once_while_engines_fail(
    mode: str, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr(quarantine, "MAX_DEATHS", 1000)  # no prompt causes a failure here
    schedule, done, replaced, fenced_messages = MODES[mode], Counter[str](), 0, 0
    for seed in range(100):
        world, nemesis = torture(seed, mode)
        staleness = staleness_in_data(world)
        assert min(staleness) >= 0 and max(staleness) <= schedule.max_staleness, f"seed {seed}"
        seqs = [group.seq for group in world.observer.groups]
        assert seqs == list(range(world.steps * world.groups_per_step)), (
            f"seed {seed}: expected every prompt once, in order"
        )
        assert world.ledger.counts()["trained"] == len(seqs) and not world.ledger.dropped
        world.ledger.check()
        done += nemesis.done
        replaced += world.fleet.replaced
        fenced_messages += world.fleet.fenced_messages
    assert all(
        done[act] > 20
        for act in ("_kill", "_suspend", "_fail_loads", "_slow_loads", "_add", "_remove", "_pause")
    ), f"actions: {done}"
    assert replaced > 20 and fenced_messages > 0
    fault.fired()
    fault.counted(lost=0, twice=0)  # seqs, in each of the 100 runs


def play(world: World, script: object) -> World:
    """Run the loop together with the script; return the world when the loop has ended."""

    async def scenario() -> World:
        loop = world.build()
        await world.synchronizer.sync_weights(0)
        acting = asyncio.create_task(script(world))  # type: ignore[operator]
        try:
            await loop.run()
            assert acting.done(), "the run ended before the script"
        finally:
            acting.cancel()
            await asyncio.wait({acting})
        acting.result()
        return world

    return run_virtual(scenario())  # type: ignore[no-any-return]


def test_bound_breaks_when_engine_with_old_weights_stays_in_rotation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that the torture test detects an engine that gets prompts before it has caught up."""
    monkeypatch.setattr(Fleet, "fell_behind", lambda self, member: None)
    monkeypatch.setattr(quarantine, "MAX_DEATHS", 1000)
    assert sum(torture(seed, "async swap")[0].ledger.dropped["stale"] for seed in range(30))


@pytest.mark.fault("A1", "engine dies, and its replacement needs 120 s to start")
def test_training_continues_while_dead_engine_is_replaced(fault: Fault) -> None:
    async def script(world: World) -> None:
        await asyncio.sleep(3)
        world.engines[0].die()
        fault.fired()
        before = world.loop.step
        await asyncio.sleep(50)
        assert world.loop.step > before + 3, "training stopped while the new engine was starting"
        assert [member.name for member in world.fleet] == ["rollout-1"]
        assert world.fleet.replaced == 0

    world = play(
        World(schedule=MODES["async swap"], num_engines=2, elastic=True, start_s=120, steps=150),
        script,
    )
    assert world.fleet.replaced == 1
    world.ledger.check()
    fault.counted(lost=0, twice=0)
    assert {member.name for member in world.fleet} == {"rollout-0", "rollout-1"}
    assert {member.incarnation for member in world.fleet} == {1, 2}


@pytest.mark.fault("B2", "suspended engine replaced, wakes up and sends messages")
def test_unresponsive_engine_is_replaced_and_its_late_messages_are_fenced(fault: Fault) -> None:
    async def script(world: World) -> None:
        await asyncio.sleep(3)
        frozen = world.engines[0]
        assert frozen.running
        frozen.freeze()
        fault.fired()
        await asyncio.sleep(19)
        assert not frozen.worker.died.done()
        await asyncio.sleep(3)
        assert frozen.worker.died.done()
        fault.detected(seconds=22)
        frozen.thaw()
        await asyncio.sleep(30)
        assert world.fleet.fenced_messages > 0

    world = play(World(schedule=MODES["async swap"], num_engines=2, elastic=True, steps=40), script)
    assert [group.seq for group in world.observer.groups] == list(range(40 * 3))
    fault.counted(lost=0, twice=0)


@pytest.mark.fault("A1", "engine dies at every start")
def test_run_fails_when_engine_exceeds_max_restarts(fault: Fault) -> None:
    async def script(world: World) -> None:
        await asyncio.sleep(3)
        world.start_failures = 10
        world.engines[1].die()
        fault.fired()

    with pytest.raises(
        WorkerDied,
        match=r"(?s)'rollout-1' failed 3 times in a row .*max_restarts = 2\)"
        r".*died while starting \(planted\)",
    ):
        play(
            World(
                schedule=MODES["async swap"],
                num_engines=2,
                elastic=True,
                steps=1000,
                max_restarts=2,
            ),
            script,
        )


@pytest.mark.fault("A1", "engine dies ten times in one run")
def test_engine_is_replaced_without_limit_if_it_finishes_completions(fault: Fault) -> None:
    async def script(world: World) -> None:
        for _ in range(10):
            await asyncio.sleep(60)
            world.engines[-1].die()

    world = play(
        World(schedule=MODES["async swap"], elastic=True, steps=600, max_restarts=1, train_s=0.5),
        script,
    )
    assert world.fleet.replaced == 10
    fault.fired()


def test_generation_timeout_starts_over_when_engine_dies() -> None:
    async def script(world: World) -> None:
        await asyncio.sleep(150)  # of 200 s that a completion takes
        world.engines[0].die()

    world = World(schedule=MODES["async swap"], elastic=True, steps=1, generation_timeout=250)
    world.make_engine, world.engine_s = SteadyEngine, 10.0
    play(world, script)
    assert world.fleet.replaced == 1
    assert max(group.finished_s - group.started_s for group in world.observer.groups) > 250


def test_tokens_from_before_an_interruption_survive_death_of_engine() -> None:
    async def script(world: World) -> None:
        await asyncio.sleep(35)
        await world.rollouter.pause_rollout()
        await world.rollouter.resume_rollout()
        await asyncio.sleep(15)
        kept = world.engines[0].resumed
        assert kept >= 4
        world.engines[0].die()
        await asyncio.sleep(15)  # the replacement starts
        assert world.engines[1].resumed == kept

    world = World(schedule=MODES["async interrupt"], elastic=True, steps=1)
    world.make_engine, world.engine_s = SteadyEngine, 10.0
    play(world, script)


def test_other_engines_resume_completions_of_removed_engine() -> None:
    async def script(world: World) -> None:
        await asyncio.sleep(3)
        made = sum(len(state["tokens"]) for state in world.engines[0].running.values())
        assert made > 3
        await world.fleet.remove("rollout-0")
        await asyncio.sleep(1)
        assert world.engines[1].resumed >= made
        with pytest.raises(ConfigError, match="no other worker is in rotation"):
            await world.fleet.remove("rollout-1")
        with pytest.raises(
            ConfigError, match="there is no rollout worker 'rollout-0'; expected one of rollout-1"
        ):
            await world.fleet.remove("rollout-0")

    world = play(
        World(schedule=MODES["async swap"], num_engines=2, elastic=True, group_size=4), script
    )
    assert [member.name for member in world.fleet] == ["rollout-1"] and world.fleet.replaced == 0


@pytest.mark.fault("E3", "one of two engines does not get the new weights")
def test_engine_that_missed_weight_sync_gets_no_prompts_until_caught_up(fault: Fault) -> None:
    async def script(world: World) -> None:
        await asyncio.sleep(3)
        world.engines[1].load_s = 400.0
        while (
            world.engines[1].version == world.synchronizer.version or world.synchronizer.version < 3
        ):
            await asyncio.sleep(0.5)
        slow = next(member for member in world.fleet if member.name == "rollout-1")
        assert slow.state is State.CATCHING_UP and not slow.in_rotation
        fault.fired()
        tokens, before = world.engines[1].tokens, world.loop.step
        await asyncio.sleep(60)
        made = world.engines[1].tokens
        await asyncio.sleep(30)
        assert world.engines[1].tokens == made or slow.state is State.LIVE, (
            f"it generated more after the {made - tokens} tokens of its requests"
        )
        assert world.loop.step > before + 3, "training stopped"
        world.engines[1].load_s = 0.1
        while not slow.in_rotation:
            await asyncio.sleep(1)
        assert world.engines[1].version >= world.synchronizer.version

    world = play(
        World(schedule=MODES["async swap"], num_engines=2, elastic=True, steps=500, train_s=1.0),
        script,
    )
    assert max(world.synchronizer.seconds) < 30


class UnresponsiveWhileLoading(FakeEngine):
    """Engine that does not reply while it copies weights out of shared memory."""

    async def load_weights(self, weights: Weights) -> None:
        if self.load_s < 1:
            return await super().load_weights(weights)
        self.freeze()
        asyncio.get_running_loop().call_later(self.load_s, self.thaw)
        await self._reply()
        self.version = weights.version


@pytest.mark.parametrize("mode", ["async interrupt", "one step off"])
@pytest.mark.fault("E3", "one of two engines takes 30 s to load")
def test_sync_does_not_wait_for_engine_that_is_loading(mode: str, fault: Fault) -> None:
    async def script(world: World) -> None:
        await asyncio.sleep(10)
        world.engines[1].load_s = 30.0
        fault.fired()
        while world.loop.step < 15:
            await asyncio.sleep(1)
        world.engines[1].load_s = 0.1
        slow = next(member for member in world.fleet if member.name == "rollout-1")
        while not slow.in_rotation:
            await asyncio.sleep(1)

    busy = World(
        schedule=MODES[mode],
        num_engines=2,
        elastic=True,
        steps=60,
        engine_s=0.1,
        train_s=1.0,
        heartbeat_timeout_s=60,
    )
    busy.make_engine = UnresponsiveWhileLoading
    world = play(busy, script)
    assert max(world.synchronizer.seconds) < 15 and world.fleet.replaced == 0


def test_engine_that_does_not_reply_while_it_loads_is_kept() -> None:
    """Loading takes longer than the heartbeat timeout of 20 s; sync.timeout_s is the limit."""

    async def script(world: World) -> None:
        await asyncio.sleep(10)
        world.engines[1].load_s = 40.0
        await asyncio.sleep(60)
        world.engines[1].load_s = 0.1

    world = World(schedule=MODES["async swap"], num_engines=2, elastic=True, steps=100)
    world.make_engine, world.train_s = UnresponsiveWhileLoading, 5.0
    assert play(world, script).fleet.replaced == 0


def test_loads_that_newer_weights_overtake_do_not_count_as_failures() -> None:
    async def scenario() -> None:
        world = World(schedule=MODES["async swap"], elastic=True)
        world.build()
        await world.synchronizer.sync_weights(0)
        (member,), engine, loads = world.fleet, world.engines[0], 0

        async def load(weights: Weights) -> None:
            nonlocal loads
            loads += 1
            if loads <= 10:
                world.synchronizer._weights = Weights(loads)  # published meanwhile
                raise SyncError("these weights are gone")

        engine.load_weights = load  # type: ignore[method-assign]
        member.state = State.CATCHING_UP
        await world.synchronizer.catch_up(member)
        assert member.state is State.LIVE and not engine.worker.died.done()

    run_virtual(scenario())


def test_waiting_turns_look_for_an_engine_again_when_theirs_falls_behind() -> None:
    async def scenario() -> int:
        world = World(num_engines=2, elastic=True)
        world.build()
        looked: list[None] = []
        world.fleet.on_change = lambda: looked.append(None)
        world.fleet.fell_behind(next(iter(world.fleet)))
        return len(looked)

    assert run_virtual(scenario()) == 1


def test_fleet_cannot_change_when_it_shares_worker_with_trainer() -> None:
    async def script(world: World) -> None:
        await asyncio.sleep(3)
        with pytest.raises(ConfigError, match="give rollout a separate pool"):
            await world.fleet.add()
        with pytest.raises(ConfigError, match="it has other roles too"):
            await world.fleet.remove("rollout-0")
        world.engines[0].die()

    with pytest.raises(WorkerDied, match="'rollout-0' died"):
        play(World(schedule=MODES["async swap"], num_engines=2, steps=100), script)


def test_failed_additions_are_not_reported_as_starting() -> None:
    async def script(world: World) -> None:
        await asyncio.sleep(3)
        world.start_failures = 2
        with pytest.raises(WorkerDied, match="planted"):
            await world.fleet.add(2)
        assert world.fleet.unavailable_engines() == []

    play(World(schedule=MODES["async swap"], elastic=True, max_restarts=0, steps=30), script)


def test_engine_at_address_of_removed_one_has_its_own_completions() -> None:
    async def scenario() -> list[int]:
        world = World(schedule=MODES["async swap"], elastic=True)
        world.build()
        fleet = world.fleet
        (member,) = fleet
        member.completions = 5
        assert fleet.take_completions() == [5]
        fleet._members.clear()
        address = id(member)
        del member
        others = []  # kept, so that each has another address
        while True:
            others.append(Member("rollout-1", 1, world.engines[0]))  # type: ignore[arg-type]
            if id(others[-1]) == address or len(others) == 10_000:
                break
        fleet._members.append(others[-1])
        return fleet.take_completions()

    assert run_virtual(scenario()) == [0]


def test_first_sync_fails_when_all_engines_are_dead() -> None:
    async def scenario() -> None:
        world = World(schedule=MODES["async swap"], elastic=True, num_engines=2)
        world.build()
        for engine in world.engines:
            engine.die()
        async with asyncio.timeout(1e4):
            await world.synchronizer.sync_weights(0)

    with pytest.raises(WorkerDied, match="'rollout-0' died"):
        run_virtual(scenario())


def test_error_names_timeout_when_engine_does_not_load_weights() -> None:
    async def scenario() -> BaseException | None:
        world = World(schedule=MODES["async swap"], elastic=True)
        world.build()
        await world.synchronizer.sync_weights(0)
        (member,) = world.fleet
        member.state = State.STARTING
        world.engines[0].freeze()
        await world.synchronizer.catch_up(member)
        return member.engine.worker.died.exception()

    assert str(run_virtual(scenario())).endswith("no reply within sync.timeout_s = 60 s")
