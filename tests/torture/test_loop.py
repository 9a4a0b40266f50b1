"""The real loop with random latencies: thousands of seeds in virtual time.

Staleness is read from the data: the value of a fake token is the version that generated it.
"""

import asyncio
import random

import numpy as np
import pytest

from paceline.errors import (
    LedgerError,
    MismatchError,
    PacelineError,
    RewardError,
    SyncError,
    WorkerDied,
)
from paceline.queue.admission import Admission
from paceline.queue.ledger import Ledger
from paceline.schedule import ScheduleSettings
from paceline.types import OnSync, Prompt
from tests.fakes import FakeEngine, World
from tests.fault_report import Fault
from tests.virtual import run_virtual

MODES = {
    "sync": ScheduleSettings(max_staleness=0, on_sync=OnSync.DRAIN),
    "one step off": ScheduleSettings(max_staleness=1, on_sync=OnSync.DRAIN),
    "async swap": ScheduleSettings(max_staleness=3, on_sync=OnSync.SWAP),
    "async interrupt": ScheduleSettings(max_staleness=2, on_sync=OnSync.INTERRUPT),
    "two steps per sync": ScheduleSettings(max_staleness=1, sync_every=2, on_sync=OnSync.SWAP),
    "three per sync, deep": ScheduleSettings(
        max_staleness=5, sync_every=3, on_sync=OnSync.INTERRUPT
    ),
}


def random_world(seed: int, schedule: ScheduleSettings) -> World:
    rng = random.Random(seed * 7919 + 1)
    return World(
        seed=seed,
        schedule=schedule,
        groups_per_step=rng.randint(1, 4),
        group_size=rng.randint(1, 3),
        num_engines=rng.randint(1, 3),
        engine_s=rng.choice([0.01, 0.3, 3.0]),
        train_s=rng.choice([0.01, 1.0, 10.0]),
    )


def staleness_in_data(world: World) -> list[int]:
    """Return the staleness of every trained row: its step minus the oldest version in it."""
    found = []
    for step, batch in zip(world.trainer.steps, world.trainer.batches, strict=True):
        assert (batch.versions[batch.mask] == batch.tokens[batch.mask]).all(), (
            "a token is labeled with the wrong version"
        )
        found += [
            step - int(row[row >= 0].min()) for row in np.split(batch.versions, batch.offsets[1:-1])
        ]
    return found


class SharedWeightsEngine(FakeEngine):
    """Generates with the trainer's parameters, which change when a train step ends."""

    trained: list[int]

    @property
    def weights(self) -> int:
        return len(self.trained)


@pytest.mark.parametrize("mode", ["one step off", "async swap", "async interrupt"])
def test_tokens_have_correct_version_when_weights_are_shared(
    mode: str,
) -> None:
    for seed in range(50):
        world = random_world(seed, MODES[mode])
        world.make_engine, world.num_engines, world.takes_turns = SharedWeightsEngine, 1, True
        loop = world.build()
        world.engines[0].trained = world.trainer.steps  # type: ignore[attr-defined]
        run_virtual(loop.run())
        assert max(staleness_in_data(world)) <= world.schedule.max_staleness


@pytest.mark.parametrize("mode", MODES)
def test_every_prompt_is_trained_once_within_staleness_bound(
    mode: str,
) -> None:
    schedule, worst = MODES[mode], 0
    for seed in range(200):
        world = random_world(seed, schedule)
        run_virtual(world.build().run())
        staleness = staleness_in_data(world)
        assert min(staleness) >= 0 and max(staleness) <= schedule.max_staleness, f"seed {seed}"
        worst = max(worst, *staleness)
        seqs = [group.seq for group in world.observer.groups]
        assert seqs == list(range(world.steps * world.groups_per_step)), (
            f"seed {seed}: expected every prompt once, in order"
        )
        assert world.ledger.counts()["trained"] == len(seqs) and not world.ledger.dropped
        world.ledger.check()
    assert worst == schedule.max_staleness, (
        "the bound must be reached for the assertion above to mean something"
    )


@pytest.mark.parametrize("mode", MODES)
def test_every_prompt_is_trained_once_when_engines_and_trainer_take_turns(mode: str) -> None:
    for seed in range(50):
        world = random_world(seed, MODES[mode])
        world.takes_turns = True
        run_virtual(world.build().run())
        assert max(staleness_in_data(world)) <= world.schedule.max_staleness
        seqs = [group.seq for group in world.observer.groups]
        assert seqs == list(range(world.steps * world.groups_per_step)), f"seed {seed}"


def return_tickets_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free a ticket when its group is taken, before the weights of this step are live."""

    def take(self: Admission, seqs: list[int]) -> None:
        for seq in seqs:
            del self._coming[seq]
        self.changed.notify_all()

    monkeypatch.setattr(Admission, "take", take)


def test_bound_breaks_when_tickets_return_before_weights_are_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that the torture test detects a ticket that is released too early."""
    return_tickets_early(monkeypatch)
    broken = 0
    for seed in range(50):
        world = random_world(seed, MODES["async swap"])
        run_virtual(world.build().run())
        broken += world.ledger.dropped["stale"]
    assert broken


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.fault("D1", "reward raises for 8 of 40 prompts")
def test_failed_groups_are_dropped_and_replaced(mode: str, fault: Fault) -> None:
    schedule = MODES[mode]
    for seed in range(100):
        bad = set(random.Random(seed).sample(range(40), 8))

        def score(prompt: Prompt, bad: set[int] = bad) -> list[float] | None:
            if prompt.tokens[0] in bad:
                raise RewardError("planted")
            return None

        world = random_world(seed, schedule)
        world.score, world.max_failed_groups = score, 100
        run_virtual(world.build().run())
        assert max(staleness_in_data(world)) <= schedule.max_staleness
        trained = [group.seq for group in world.observer.groups]
        assert len(trained) == world.steps * world.groups_per_step == len(set(trained))
        assert not bad & set(trained)
        counts = world.ledger.counts()
        failed = counts["dropped"].get("reward_failed", 0)
        assert failed <= len(bad)
        settled = counts["trained"] + sum(counts["dropped"].values())
        assert counts["issued"] == settled + counts["outstanding"]
        if failed:
            fault.fired()
        fault.counted(lost=0, twice=len(trained) - len(set(trained)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.fault("F1", "queue smaller than the admitted groups")
def test_small_queue_limits_generation_and_drops_nothing(mode: str, fault: Fault) -> None:
    schedule = MODES[mode]
    for seed in range(100):
        world = random_world(seed, schedule)
        world.max_queue_size = world.groups_per_step + seed % 2
        run_virtual(world.build().run())
        world.ledger.check()
        assert max(staleness_in_data(world)) <= schedule.max_staleness
        assert not world.ledger.dropped["queue_full"]
    fault.fired()


@pytest.mark.parametrize("victim", ["feed", "train", "watch", "rollout"])
@pytest.mark.fault("A9", "task {victim} of the controller dies")
def test_run_fails_when_task_is_cancelled(victim: str, fault: Fault) -> None:
    for seed in range(20):

        async def scenario(seed: int = seed) -> None:
            world = random_world(seed, MODES["async swap"])
            world.steps = 1000
            run = asyncio.create_task(world.build().run())
            await asyncio.sleep(5)
            while not (
                tasks := [t for t in asyncio.all_tasks() if t.get_name().startswith(victim)]
            ):
                await asyncio.sleep(0.1)
            tasks[0].cancel()
            fault.fired()
            async with asyncio.timeout(1):
                await run

        with pytest.raises(WorkerDied, match=victim):
            run_virtual(scenario())


def test_each_version_is_checked_before_engines_get_next_one() -> None:
    log: list[str] = []
    world = World(schedule=MODES["async swap"], engine_s=0.01, train_s=0.01)

    async def check(version: int) -> None:
        await asyncio.sleep(1.0)
        log.append(f"version {version}: {world.synchronizer.version}")

    world.check_weights = lambda groups, version: check(version)
    run_virtual(world.build().run())
    assert log == [f"version {n}: {n}" for n in range(1, 6)], "the last version makes no tokens"


def test_run_ends_when_weight_check_fails() -> None:
    world = World(schedule=MODES["async swap"])

    async def check(version: int) -> None:
        if version == 2:
            raise MismatchError("wrong weights")

    world.check_weights = lambda groups, version: check(version)
    with pytest.raises(MismatchError):
        run_virtual(world.build().run())
    assert len(world.trainer.steps) in (2, 3)


def test_source_observes_every_trained_group_once() -> None:
    world = World(schedule=MODES["async swap"])
    run_virtual(world.build().run())
    assert world.source.observed == [group.seq for group in world.observer.groups]


def test_run_fails_when_worker_dies() -> None:
    async def scenario() -> None:
        died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        world = World(steps=1000, guards=[("rollout-0", died)])
        run = asyncio.create_task(world.build().run())
        await asyncio.sleep(5)
        died.set_exception(WorkerDied("worker 'rollout-0' died"))
        async with asyncio.timeout(1):
            await run

    with pytest.raises(WorkerDied, match="rollout-0"):
        run_virtual(scenario())


def test_cancelling_run_cancels_all_its_tasks() -> None:
    async def scenario() -> int:
        world = World(steps=1000)
        run = asyncio.create_task(world.build().run())
        await asyncio.sleep(5)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        return len(asyncio.all_tasks())

    assert run_virtual(scenario()) <= 2  # this scenario and its time limit


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.fault("E2", "weight sync fails twice")
def test_failed_weight_sync_is_retried(mode: str, fault: Fault) -> None:
    async def scenario() -> World:
        world = World(schedule=MODES[mode])
        loop = world.build()
        world.engines[0].fail_loads = 2
        await loop.run()
        return world

    world = run_virtual(scenario())
    assert world.synchronizer.retried == 2 and world.engines[0].version == world.steps
    fault.fired()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.fault("E3", "sync to one of two engines fails twice")
def test_engine_catches_up_after_failed_load(mode: str, fault: Fault) -> None:
    async def scenario() -> World:
        world = World(schedule=MODES[mode], num_engines=2, steps=12)
        loop = world.build()
        world.engines[1].fail_loads = 2
        await loop.run()
        return world

    world = run_virtual(scenario())
    assert world.synchronizer.retried == 0 and not world.engines[1].fail_loads
    fault.fired()
    assert [engine.version for engine in world.engines] == [12, 12]
    assert max(staleness_in_data(world)) <= MODES[mode].max_staleness


@pytest.mark.fault("E2", "weight sync fails for good")
def test_run_fails_when_weight_sync_keeps_failing(fault: Fault) -> None:
    async def scenario() -> None:
        world = World()
        loop = world.build()
        world.engines[0].fail_loads = 1000
        await loop.run()

    with pytest.raises(SyncError, match="failed 4 times: planted"):
        run_virtual(scenario())
    fault.fired()


def test_resumed_run_trains_unfinished_prompts_first_and_once() -> None:
    for seed in range(50):
        first = random_world(seed, MODES["async swap"])
        run_virtual(first.build().run())
        state = first.ledger.state()
        assert state.outstanding
        second = random_world(seed + 1000, MODES["async swap"])
        second.steps, second.groups_per_step = 12, first.groups_per_step
        loop = second.build(Ledger(state=state))
        for engine in second.engines:
            engine.version = 6
        run_virtual(loop.run(first_step=6))
        seqs = [group.seq for group in first.observer.groups + second.observer.groups]
        assert seqs == list(range(12 * first.groups_per_step))


@pytest.mark.fault("E4", "sample has a newer version than the trainer")
def test_run_fails_when_sample_is_newer_than_trainer(fault: Fault) -> None:
    async def scenario() -> None:
        world = World()
        loop = world.build()
        world.engines[0].version = 7
        await loop.run()

    with pytest.raises(PacelineError, match="version 7"):
        run_virtual(scenario())
    fault.fired()


def test_ledger_rejects_settling_group_twice() -> None:
    ledger = Ledger()
    seq = ledger.issue()
    ledger.trained(seq, uid="a", step=0, staleness=0)
    with pytest.raises(LedgerError, match="settled before"):
        ledger.drop(seq, "stale")
