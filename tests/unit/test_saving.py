"""Checkpoints are written during training, one at a time; the loop waits where it must."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from paceline.errors import CheckpointError
from paceline.training.saving import Saver
from tests.fakes import World
from tests.fault_report import Fault
from tests.virtual import run_virtual


class Disk:
    """Writes checkpoints in virtual time, and records when."""

    def __init__(self, copy_s: float = 1.0, write_s: float = 10.0, fails_at: int = 0) -> None:
        self.copy_s, self.write_s, self.fails_at = copy_s, write_s, fails_at
        self.writing: list[int] = []
        self.done: list[int] = []

    async def save(self, step: int, copied: Callable[[], None] | None) -> None:
        self.writing.append(step)
        assert len(self.writing) == 1, "two checkpoints at a time"
        try:
            await asyncio.sleep(self.copy_s)
            if copied:
                copied()
            await asyncio.sleep(self.write_s)
            if step == self.fails_at:
                raise CheckpointError("planted: no space left")
            self.done.append(step)
        finally:
            self.writing.remove(step)


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.fault("C6", "slow disk: a checkpoint takes 10 steps to write")
def test_training_continues_while_checkpoint_is_written(
    caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    async def scenario() -> None:
        disk = Disk()
        saver = Saver(disk.save, every=1, every_s=0)
        await saver.save(1)
        assert now() == 1 and disk.done == []
        assert saver.metrics() == {"time/save_s": 1, "time/save_wait_s": 0}
        await asyncio.sleep(4)
        with caplog.at_level(logging.WARNING):
            await saver.save(2)  # waits for the first one
        assert now() == 12 and disk.done == [1]
        assert saver.metrics() == {"time/save_s": 7, "time/save_wait_s": 6}
        await saver.save(2, beside=False)
        assert now() == 22 and disk.done == [1, 2]
        await saver.save(3, beside=False)
        assert now() == 33 and disk.done == [1, 2, 3]

    run_virtual(scenario())
    fault.fired()
    assert "step 2 waited 6.0 s until the checkpoint of step 1 was written" in caplog.text


def test_checkpoint_is_due_by_steps_or_by_time() -> None:
    async def scenario() -> None:
        saver = Saver(Disk(0, 0).save, every=10, every_s=60)
        assert [step for step in range(1, 25) if saver.due(step)] == [10, 20]
        await asyncio.sleep(60)
        assert saver.due(3)
        await saver.save(3)
        assert not saver.due(4)
        never = Saver(Disk().save, every=0, every_s=0)
        assert not any(never.due(step) for step in range(1, 100))

    run_virtual(scenario())


def test_failed_write_is_raised_by_next_save() -> None:
    async def scenario() -> None:
        saver = Saver(Disk(fails_at=1).save, every=1, every_s=0)
        await saver.save(1)
        with pytest.raises(CheckpointError, match="no space left"):
            await saver.save(2)

    run_virtual(scenario())


def test_end_warns_when_checkpoint_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        saver = Saver(Disk(write_s=100).save, every=1, every_s=0)
        await saver.save(1)
        await saver.end(30)

    run_virtual(scenario())
    assert "the last checkpoint was stopped before it was complete (after 30 s)" in caplog.text


def test_loop_saves_every_step_beside_training_and_last_one_before_it_ends() -> None:
    disk = Disk(copy_s=0.5, write_s=30.0)
    world = World(steps=5, save_every=1, save=disk.save)
    run_virtual(world.build().run())
    assert disk.done == [1, 2, 3, 4, 5]
    assert sum(row["time/save_wait_s"] for row in world.observer.rows) > 0


@pytest.mark.fault("C1", "disk full while a checkpoint is written beside training")
def test_loop_fails_during_training_when_checkpoint_cannot_be_written(fault: Fault) -> None:
    disk = Disk(copy_s=0.1, write_s=0.1, fails_at=2)
    world = World(steps=1000, save_every=1, save=disk.save, train_s=50.0)
    with pytest.raises(CheckpointError, match="no space left"):
        run_virtual(world.build().run())
    fault.fired()
    assert len(world.trainer.steps) == 2, "it was reported during the third step"


def test_checkpoint_becomes_complete_when_run_fails() -> None:
    async def scenario(disk: Disk) -> None:
        world = World(steps=1000, save_every=3, save=disk.save)
        loop = world.build()
        step = world.trainer.step

        async def failing(*args: object) -> dict[str, float]:
            if loop.step == 3:
                raise CheckpointError("another error")
            return await step(*args)  # type: ignore[arg-type]

        world.trainer.step = failing  # type: ignore[assignment]
        await loop.run()

    disk = Disk(copy_s=0.1, write_s=20.0)
    with pytest.raises(CheckpointError, match="another error"):
        run_virtual(scenario(disk))
    assert disk.done == [3]
    slow = Disk(copy_s=0.1, write_s=1e5)
    with pytest.raises(CheckpointError, match="another error"):
        run_virtual(scenario(slow), limit_s=1000)
    assert slow.done == [] and slow.writing == []
