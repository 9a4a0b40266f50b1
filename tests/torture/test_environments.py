"""The real loop in virtual time: episodes that wait for slow environments."""

import asyncio
from collections.abc import Sequence

import pytest

from paceline.rollout.environment import Generate
from paceline.schedule import ScheduleSettings
from paceline.types import OnSync, Prompt, Trajectory, Turn
from tests.fakes import World
from tests.torture.test_fleet import play

SLOW_S = 5000.0


class SometimesSlow:
    """Two turns; between them, the environment of some prompts takes long."""

    def __init__(self, slow: range) -> None:
        self._slow = slow
        self.waiting = self.most_waiting = 0
        self.times: dict[int, float] = {}

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        number, clock = prompt.tokens[0], asyncio.get_running_loop().time
        begun = clock()
        first = await generate(prompt.tokens)
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        await asyncio.sleep(SLOW_S if number in self._slow else 1.0)
        self.waiting -= 1
        context = (*prompt.tokens, *map(int, first.tokens), 7)
        second = await generate(context)
        self.times[number] = max(self.times.get(number, 0.0), clock() - begun)
        return Trajectory((Turn(prompt.tokens, first), Turn((7,), second)), "")


def world_with(environment: SometimesSlow, groups_per_step: int, slots: int) -> World:
    world = World(
        schedule=ScheduleSettings(max_staleness=1, on_sync=OnSync.SWAP),
        steps=2,
        groups_per_step=groups_per_step,
        group_size=4,
        num_engines=2,
        engine_s=0.01,
        environment=environment,
    )
    world.slots = slots
    return world


def finished_at(world: World, sequences: Sequence[int]) -> list[float]:
    found = {group.seq: group.finished_s for group in world.observer.groups}
    return [found[seq] for seq in sequences]


def test_fast_episodes_finish_while_2000_wait_for_their_environment() -> None:
    slow = range(500)  # groups of 4: they are admitted first, and are 50 times the slots
    environment = SometimesSlow(slow)
    world = world_with(environment, groups_per_step=300, slots=10)
    play(world, lambda _: asyncio.sleep(0))
    assert environment.most_waiting >= 2000
    fast = finished_at(world, range(500, 600))
    assert max(fast) < SLOW_S / 10, "fast episodes waited for slow ones"
    assert min(finished_at(world, slow)) >= SLOW_S
    assert not world.ledger.dropped


def test_engine_has_no_place_for_episode_that_waits_for_its_environment() -> None:
    environment = SometimesSlow(range(4))
    loads: list[int] = []

    async def script(world: World) -> None:
        await asyncio.sleep(SLOW_S / 2)
        loads.extend(member.load for member in world.fleet)

    world = world_with(environment, groups_per_step=4, slots=8)
    play(world, script)
    assert loads == [0, 0]


def test_further_turns_get_places_before_new_prompts() -> None:
    environment = SometimesSlow(range(0))
    world = world_with(environment, groups_per_step=200, slots=2)
    world.engine_s = 0.5
    play(world, lambda _: asyncio.sleep(0))
    # Hundreds of prompts compete for 2 engines of 2 slots. An episode that has begun does not wait
    # for the prompts that came after it.
    whole = max(finished_at(world, range(400)))
    assert max(environment.times[number] for number in range(20)) < whole / 5


class FewAtOnce:
    """Two turns; an episode needs one of few browsers, from before the first turn to its end."""

    def __init__(self, browsers: int) -> None:
        self._browsers = asyncio.Semaphore(browsers)

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        async with self._browsers:
            first = await generate(prompt.tokens)
            await asyncio.sleep(1.0)
            second = await generate((*prompt.tokens, *map(int, first.tokens), 7))
        return Trajectory((Turn(prompt.tokens, first), Turn((7,), second)), "")


def test_further_turns_do_not_wait_for_episodes_that_have_not_begun() -> None:
    world = World(
        schedule=ScheduleSettings(max_staleness=1, on_sync=OnSync.SWAP),
        steps=2,
        groups_per_step=6,
        group_size=8,
        num_engines=1,
        engine_s=0.01,
        environment=FewAtOnce(4),
    )
    world.slots = 8
    play(world, lambda _: asyncio.sleep(0))
    assert max(finished_at(world, range(12))) < 200, "48 episodes, 4 at a time, 1 s each"
    assert not world.ledger.dropped


@pytest.mark.parametrize("on_sync", OnSync)
@pytest.mark.parametrize("staleness", [1, 2])
def test_interrupted_turns_resume_when_all_places_are_taken(
    on_sync: OnSync, staleness: int
) -> None:
    resumed = 0
    for seed in range(5):
        world = World(
            schedule=ScheduleSettings(max_staleness=staleness, on_sync=on_sync),
            steps=6,
            groups_per_step=4,
            group_size=4,
            num_engines=1,
            engine_s=0.5,
            seed=seed,
            environment=SometimesSlow(range(0)),
        )
        world.slots = 3
        play(world, lambda _: asyncio.sleep(0))
        assert not world.ledger.dropped
        resumed += world.engines[0].resumed
    assert bool(resumed) == (on_sync is OnSync.INTERRUPT)
