"""Load: a trainer or engines that are much faster than the others, large samples, many groups, many
runs and blocked event loops."""

import asyncio
import random
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import psutil
import pytest

from paceline.line_file import intact_rows
from paceline.queue.admission import Admission
from paceline.queue.ledger import Ledger
from paceline.queue.message_queue import MessageQueue
from paceline.rollout.engine import EngineStats
from paceline.rollout.environment import SingleTurn
from paceline.schedule import ScheduleSettings
from paceline.suspend import ignore_suspended_time
from paceline.types import Batch, Completion, Finish, OnSync, Request
from tests.fakes import FakeEngine, World
from tests.fault_report import Fault
from tests.torture.test_loop import MODES, random_world, staleness_in_data
from tests.virtual import run_virtual

ASYNC = ScheduleSettings(max_staleness=2, on_sync=OnSync.SWAP)


@pytest.mark.fault("F2", "trainer 10 times faster than the engines")
def test_trainer_waits_for_full_batches_when_it_is_10_times_faster(fault: Fault) -> None:
    for seed in range(50):
        world = random_world(seed, ASYNC)
        world.engine_s, world.train_s = 1.0, 0.1
        run_virtual(world.build().run())
        rows = {batch.num_rows for batch in world.trainer.batches}
        assert rows == {world.groups_per_step * world.group_size}, f"seed {seed}"
        world.ledger.check()
        assert not world.ledger.dropped
    fault.fired()


@pytest.mark.fault("F2", "trainer waits 3 s for engines, in real time")
def test_run_uses_little_cpu_time_while_trainer_waits(fault: Fault) -> None:
    class SlowEngine(FakeEngine):
        async def _produce(self, request: Request) -> Completion:
            await asyncio.sleep(1.5)
            return await super()._produce(request)

    world = World(schedule=ASYNC, steps=2, engine_s=0.001, train_s=0.001, make_engine=SlowEngine)
    world.groups_per_step = 9  # all that staleness admits: no step is generated ahead
    run_virtual(World().build().run())  # what is only slow the first time
    loop = world.build()
    begun, used = time.monotonic(), time.process_time()
    asyncio.run(loop.run())
    seconds, used = time.monotonic() - begun, time.process_time() - used
    assert seconds >= 1.5
    fault.fired()
    assert used < 0.05 * seconds, f"{used:.2f} s of CPU time in {seconds:.1f} s"


@pytest.mark.fault("F3", "50,000 groups through queue and ledger")
def test_queue_and_ledger_pass_1000_groups_per_second(tmp_path: Path, fault: Fault) -> None:
    groups, per_step = 50_000, 50
    path = tmp_path / "ledger.jsonl"
    ledger, queue, admission = Ledger(path), MessageQueue(3 * per_step), Admission(3 * per_step)
    used = time.process_time()
    for step in range(groups // per_step):
        while admission.free:
            seq = ledger.issue()
            admission.admit(seq)
            assert queue.put(seq, step, seq)
        seqs = admission.oldest(per_step)
        items = queue.take(per_step, step, 3, seqs)
        assert items is not None and [item.key for item in items] == seqs
        admission.take(seqs)
        for seq in seqs:
            ledger.trained(seq, uid=str(seq), step=step, staleness=0)
        ledger.flush()
        admission.release_trained()
    used = time.process_time() - used
    ledger.check()
    ledger.close()
    assert queue.counts.put == queue.counts.taken + len(queue) and not queue.counts.dropped
    trained = [event["seq"] for event in intact_rows(path) if event["event"] == "trained"]
    assert trained == list(range(groups))
    fault.fired()
    assert groups / used >= 1000, f"{groups / used:.0f} groups per second of CPU time"


class HugeEngine(FakeEngine):
    """Returns completions of 4 MB and counts those in memory."""

    TOKENS = 350_000
    alive = highest = 0

    async def _produce(self, request: Request) -> Completion:
        await asyncio.sleep(self._rng.expovariate(1 / self._mean_s))
        tokens = np.full(self.TOKENS, self.version, np.int32)
        self.count(1)
        weakref.finalize(tokens, self.count, -1)
        return Completion(tokens, np.zeros(self.TOKENS, np.float32), tokens.copy(), Finish.STOP)

    @classmethod
    def count(cls, change: int) -> None:
        cls.alive += change
        cls.highest = max(cls.highest, cls.alive)


@pytest.mark.fault("F4", "completions of 4 MB, engines 100 times faster than the trainer")
def test_memory_is_bounded_by_admitted_groups_when_samples_are_huge(fault: Fault) -> None:
    world = World(schedule=ASYNC, engine_s=0.01, train_s=1.0, make_engine=HugeEngine, steps=12)
    world.groups_per_step, world.environment = 1, SingleTurn(lambda tokens: "")
    loop = world.build()
    world.observer.step_done = lambda *_: None  # type: ignore[method-assign]
    monitored: list[int] = []

    async def step(batch: Batch, _: int) -> dict[str, float]:
        assert batch.num_tokens >= 2 * HugeEngine.TOKENS
        await asyncio.sleep(1.0)  # the engines fill the queue meanwhile
        monitored.append(HugeEngine.alive)
        return {}

    world.trainer.step = step  # type: ignore[method-assign]
    run_virtual(loop.run())
    fault.fired()
    admitted = ASYNC.capacity(world.groups_per_step) * world.group_size
    assert len(monitored) == 12 and max(monitored) > world.group_size, "nothing was queued"
    # Completions of the step before are freed when the next step has begun.
    assert HugeEngine.highest <= admitted + world.group_size
    world.ledger.check()
    assert not world.ledger.dropped


@pytest.mark.fault("F7", "500 runs of the loop, half of them cancelled")
def test_500_runs_of_loop_leave_nothing_behind(fault: Fault) -> None:
    async def cycle(seed: int) -> set[str]:
        world = random_world(seed, list(MODES.values())[seed % len(MODES)])
        world.elastic, world.steps = seed % 3 == 0, 3
        run = asyncio.create_task(world.build().run())
        if seed % 2:
            await asyncio.sleep(random.Random(seed).random() * 10)
            run.cancel()
        await asyncio.wait({run})
        others = asyncio.all_tasks() - {asyncio.current_task(), run}
        return {task.get_name() for task in others if not task.done()}

    process = psutil.Process()
    run_virtual(cycle(0))
    before = process.num_fds(), threading.active_count(), len(process.children())
    left = [names for seed in range(500) if (names := run_virtual(cycle(seed)))]
    fault.fired()
    assert not left, "tasks still run"
    assert (process.num_fds(), threading.active_count(), len(process.children())) == before


@pytest.mark.fault("F9", "event loop blocked for 3 times the heartbeat timeout")
def test_no_engine_is_replaced_when_event_loop_was_blocked(fault: Fault) -> None:
    blocked = []

    class BlockingEngine(FakeEngine):
        async def stats(self) -> EngineStats:
            if not blocked:  # a heartbeat is outstanding while the loop is blocked
                blocked.append(time.monotonic())
                asyncio.get_running_loop().call_later(0.05, time.sleep, 3.0)
            for _ in range(2):  # the reply is not there yet when the loop continues
                await asyncio.sleep(0.1)
            return await super().stats()

    async def scenario() -> World:
        ignore_suspended_time(asyncio.get_running_loop())  # as every run does
        world = World(schedule=ASYNC, elastic=True, num_engines=2, make_engine=BlockingEngine)
        world.engine_s, world.train_s, world.heartbeat_timeout_s = 0.05, 0.05, 1.0
        await world.build().run()
        return world

    world = asyncio.run(scenario())
    assert blocked and time.monotonic() - blocked[0] >= 3
    fault.fired()
    assert world.fleet.replaced == 0 and len(world.engines) == 2
    world.ledger.check()


@pytest.mark.fault("F9", "engine does not answer for 15 s, which is less than its deadline")
def test_engine_is_kept_when_it_answers_before_its_deadline(fault: Fault) -> None:
    async def scenario(seed: int) -> None:
        world = World(seed, schedule=ASYNC, elastic=True, num_engines=2, steps=40)
        run = asyncio.create_task(world.build().run())
        await asyncio.sleep(10 + seed / 10)
        world.engines[0].freeze()
        await asyncio.sleep(15)
        assert not run.done()
        world.engines[0].thaw()
        await run
        assert world.fleet.replaced == 0
        world.ledger.check()
        assert not world.ledger.dropped

    for seed in range(20):
        run_virtual(scenario(seed))
    fault.fired()


LOADS = {"slow trainer": (0.1, 10.0), "equal": (1.0, 4.0), "slow engines": (3.0, 0.1)}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("bound", [0, 1, 4, 8])
@pytest.mark.fault("F10", "max_staleness = {bound}, {load}")
def test_staleness_stays_within_bound_under_load(bound: int, load: str, fault: Fault) -> None:
    worst, means = 0, []
    for seed in range(15):
        on_sync = OnSync.SWAP if bound else OnSync.DRAIN
        world = random_world(seed, ScheduleSettings(max_staleness=bound, on_sync=on_sync))
        world.steps = 24
        world.engine_s, world.train_s = LOADS[load]
        run_virtual(world.build().run())
        found = staleness_in_data(world)
        assert min(found) >= 0 and max(found) <= bound, f"seed {seed}"
        worst = max(worst, *found)
        means += [row["staleness/mean"] for row in world.observer.rows]
        world.ledger.check()
        assert not world.ledger.dropped
    fault.fired()
    assert 0 <= np.mean(means) <= bound
    if load == "slow trainer":
        assert worst == bound, "the bound was not reached"
        assert np.mean(means) >= bound / 2, "the mean does not show the staleness of most groups"
