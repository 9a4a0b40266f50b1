"""The real loop while engines die, stop, fall behind, join and leave at random, thousands of seeds, in virtual time."""

import asyncio
import random
from collections import Counter

import pytest

from paceline.errors import ConfigError
from paceline.rollout import router
from tests.fakes import FakeEngine, World
from tests.torture.test_loop import MODES, random_world, staleness_in_data
from tests.virtual import run_virtual


class Nemesis:
    """Does things to engines while the loop runs, and counts what it did."""

    def __init__(self, world: World, rng: random.Random, mean_s: float) -> None:
        self.done: Counter[str] = Counter()
        self._world, self._rng, self._mean_s = world, rng, mean_s

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / self._mean_s))
            act = self._rng.choice([self._kill, self._stop, self._fail_loads, self._slow_loads, self._add, self._remove, self._pause])
            if await act():
                self.done[act.__name__] += 1

    def _victim(self) -> FakeEngine | None:
        members = [member for member in self._world.fleet if member.in_rotation]
        return self._rng.choice(members).engine if members else None  # type: ignore[return-value]

    async def _kill(self) -> bool:
        if victim := self._victim():
            victim.die()
        return victim is not None

    async def _stop(self) -> bool:
        """SIGSTOP; SIGCONT comes before anybody has noticed, or long after."""
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
            await self._world.fleet.remove(self._rng.choice([member.name for member in self._world.fleet] or ["none"]))
        except ConfigError:
            return False  # the last one in rotation
        return True

    async def _pause(self) -> bool:
        await self._world.rollouter.pause_rollout()
        await asyncio.sleep(self._rng.random() * 5)
        await self._world.rollouter.resume_rollout()
        return True


def torture(seed: int, mode: str) -> tuple[World, Nemesis]:
    world = random_world(seed, MODES[mode])
    world.elastic, world.steps, world.max_restarts = True, 12, 1000
    world.start_s, world.heartbeat_timeout_s, world.stall_timeout_s, world.generation_timeout = 1.0, 8.0, 500.0, 2000.0

    async def scenario() -> Nemesis:
        loop = world.build()
        rng = random.Random(seed)
        nemesis = Nemesis(world, rng, rng.choice([0.5, 3.0, 20.0]) * max(1.0, world.engine_s))
        await world.synchronizer.sync_weights(0)
        harm = asyncio.create_task(nemesis.run())
        try:
            await loop.run()
        finally:
            harm.cancel()
        return nemesis

    return world, run_virtual(scenario())


@pytest.mark.parametrize("mode", MODES)
def test_whatever_happens_to_engines_every_prompt_is_trained_once_in_order_and_within_the_bound(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "MAX_LOSSES", 1000)  # here it is never the prompt's fault
    schedule, done, replaced, refused = MODES[mode], Counter[str](), 0, 0
    for seed in range(300):
        world, nemesis = torture(seed, mode)
        staleness = staleness_in_data(world)
        assert min(staleness) >= 0 and max(staleness) <= schedule.max_staleness, f"seed {seed}"
        seqs = [group.seq for group in world.notes.groups]
        assert seqs == list(range(world.steps * world.groups_per_step)), f"seed {seed}: not every prompt once, in order"
        assert world.ledger.counts()["trained"] == len(seqs) and not world.ledger.dropped
        world.ledger.check()
        done += nemesis.done
        replaced += world.fleet.replaced
        refused += world.fleet.refused
    assert all(done[act] > 20 for act in ("_kill", "_stop", "_fail_loads", "_slow_loads", "_add", "_remove", "_pause")), (
        f"it happened: {done}"
    )
    assert replaced > 20 and refused > 0
