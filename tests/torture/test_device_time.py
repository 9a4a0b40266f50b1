"""Device-time ledger of the real loop in virtual time: it adds up exactly in every mode."""

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest

from paceline.errors import RewardError
from paceline.observe.device_meter import DeviceMeter, Metered
from paceline.remote.device_clock import ClockReport, DeviceClock
from paceline.timeline import Timeline
from paceline.types import Batch, Completion, Prompt, Request, Role
from tests.device_times import assert_device_time_adds_up
from tests.fakes import FakeEngine, World
from tests.torture.test_loop import MODES, random_world
from tests.virtual import run_virtual


def virtual_clock() -> DeviceClock:
    return DeviceClock(now=asyncio.get_running_loop().time)


@dataclass
class ClockedWorker:
    """The part of a worker that the meter reads."""

    own: DeviceClock

    @property
    def clock(self) -> ClockReport:
        return self.own.report()

    def on_time(self, time_s: float) -> float:
        return time_s


class ClockedEngine(FakeEngine):
    """Counts the time in which it generates."""

    def __init__(self, rng: random.Random, mean_s: float = 1.0, name: str = "rollout") -> None:
        super().__init__(rng, mean_s, name)
        self.device = virtual_clock()
        self._decoding: Any = None

    async def _produce(self, request: Request) -> Completion:
        if not self.running:
            self._decoding = self.device.enter("decode/8")
        try:
            completion = await super()._produce(request)
            self.device.count("decode/8", len(completion))
            return completion
        finally:
            if not self.running:
                self.device.leave(self._decoding)


async def measured(world: World, shared: bool) -> tuple[dict[str, float], float, float]:
    """Run; return the ledger, the sum of the steps' ledgers and the seconds of training."""
    world.timeline, world.make_engine = Timeline(), ClockedEngine
    loop = world.build()
    trainer = ClockedWorker(world.engines[0].device if shared else virtual_clock())  # type: ignore[attr-defined]
    step, trained = world.trainer.step, []

    async def clocked(batch: Batch, number: int) -> dict[str, float]:
        activity, begun = trainer.own.enter("training"), loop_time()
        try:
            return await step(batch, number)
        finally:
            trainer.own.leave(activity)
            trained.append(loop_time() - begun)

    loop_time = asyncio.get_running_loop().time
    world.trainer.step = clocked  # type: ignore[method-assign]
    engines = [
        Metered(e.worker.name, e.worker.name, "main", [Role.ROLLOUT], ClockedWorker(e.device))  # type: ignore[attr-defined, arg-type]
        for e in world.engines
    ]
    if shared:
        first = engines[0]
        engines = [
            Metered(first.name, first.device, "main", [Role.ACTOR, Role.ROLLOUT], first.worker)
        ]
    else:
        engines.append(Metered("train", "train", "train", [Role.ACTOR], trainer))  # type: ignore[arg-type]
    meter = DeviceMeter(
        lambda: engines,
        world.timeline,
        lambda: (world.rollouter.lost_tokens, world.rollouter.evaluation_tokens),
    )
    meter.start()
    steps, done = [], world.observer.step_done

    def step_done(*args: Any) -> None:
        ledger = meter.step()
        assert sum(ledger.parts.values()) == pytest.approx(ledger.total_s)
        steps.append(ledger.total_s)
        done(*args)

    world.observer.step_done = step_done  # type: ignore[method-assign]
    await loop.run()
    meter.end()
    return meter.summary(), sum(steps), sum(trained)


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("mode", MODES)
def test_device_time_adds_up(mode: str, shared: bool) -> None:
    for seed in range(3):
        world = random_world(seed, MODES[mode])
        if shared:
            world.num_engines, world.takes_turns = 1, True
        found, steps_s, trained_s = run_virtual(measured(world, shared))
        assert_device_time_adds_up(found, tolerance=1e-6)
        assert steps_s <= found["total_s"] + 1e-6
        if not shared:
            assert found["training_s"] == pytest.approx(trained_s)


def test_tokens_of_failed_groups_are_wasted() -> None:
    def score(prompt: Prompt) -> list[float] | None:
        if prompt.tokens[0] % 3 == 0:
            raise RewardError("planted")
        return None

    world = World(score=score, max_failed_groups=100)
    found, _, _ = run_virtual(measured(world, False))
    assert found["wasted_s"] > 0
    assert_device_time_adds_up(found, tolerance=1e-6)


def test_worker_that_was_removed_is_not_idle() -> None:
    async def run() -> dict[str, float]:
        workers = [
            Metered(name, name, "main", [Role.ROLLOUT], ClockedWorker(virtual_clock()))  # type: ignore[arg-type]
            for name in ("rollout", "removed")
        ]
        meter = DeviceMeter(lambda: workers, Timeline())
        meter.start()
        await asyncio.sleep(1)
        meter.step()
        del workers[1]
        await asyncio.sleep(9)
        meter.step()
        meter.end()
        return meter.summary()

    assert run_virtual(run())["total_s"] == pytest.approx(10 + 1)
