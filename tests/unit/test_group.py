"""Group of ranks: it replies like one worker and ends as a whole if one rank fails."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError, WorkerDied
from paceline.remote import group as remote_group
from paceline.remote.group import WorkerGroup
from paceline.remote.process import process_group
from tests.fault_report import Fault
from tests.processes import children, listening
from tests.scoring import until


class Part:
    def total(self, number: int) -> int:
        """Sum a number of each rank over all ranks."""
        import torch
        import torch.distributed as dist

        value = torch.tensor(number + dist.get_rank())
        dist.all_reduce(value)
        return int(value)

    def fail(self) -> None:
        raise DataError("every rank fails")

    def fail_on(self, rank: int) -> None:
        import torch.distributed as dist

        if dist.get_rank() == rank:
            raise RuntimeError("only on this rank")
        dist.barrier()

    def pid(self) -> int:
        return os.getpid()


def build() -> Mapping[str, Any]:
    import torch.distributed as dist

    return {"part": Part(), "first": Part()} if dist.get_rank() == 0 else {"part": Part()}


def build_with_broken_rank() -> Mapping[str, Any]:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise DataError("rank 1 cannot start")
    dist.barrier()
    return {}


@asynccontextmanager
async def group(folder: Path, builder: Any = build) -> AsyncIterator[WorkerGroup]:
    made = process_group(
        "train", builder, (), ranks=2, threads=1, log_folder=folder, first_only={"first"}
    )
    try:
        yield made
    finally:
        await made.close()
        assert not children(), "a rank was left behind"


def test_group_replies_as_one_worker_also_after_call_that_fails_on_all_ranks(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        async with group(tmp_path) as ranks:
            await ranks.ready()
            replies = [ranks.start_call("part", "total", number) for number in range(5)]
            assert await asyncio.gather(*replies) == [2 * number + 1 for number in range(5)]
            assert await ranks.call("first", "pid") == ranks.ranks[0].process.pid
            assert await ranks.peak_memory() > 100e6
            assert listening(rank.process.pid for rank in ranks.ranks) <= {"127.0.0.1"}
            with pytest.raises(DataError, match="every rank fails"):
                await ranks.call("part", "fail")
            assert await ranks.call("part", "total", 1) == 3

    asyncio.run(check())


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.fault("A7", "rank {victim} of two killed while the other waits for it")
def test_group_ends_and_names_rank_when_it_is_killed(
    victim: int, tmp_path: Path, fault: Fault
) -> None:
    async def check() -> None:
        async with group(tmp_path) as ranks:
            await ranks.ready()
            started = time.monotonic()
            # A barrier, which blocks the other rank when this one is killed.
            blocked = ranks.start_call("part", "fail_on", 7)
            os.kill(ranks.ranks[victim].process.pid, signal.SIGKILL)
            fault.fired()
            following = ranks.start_call("part", "total", 1)
            for reply in (blocked, following):
                with pytest.raises(
                    WorkerDied, match=f"worker 'train rank {victim}' died .killed by signal 9"
                ):
                    await reply
                    await ranks.call("part", "total", 1)
            with pytest.raises(WorkerDied, match=f"rank {victim}"):
                await ranks.call("part", "total", 1)
            fault.detected()
            assert time.monotonic() - started < 60, "the barrier waited for its own deadline"

    asyncio.run(check())


@pytest.mark.fault("A7", "one of two ranks raises")
def test_group_ends_with_log_lines_of_rank_when_it_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr(remote_group, "GRACE_S", 0.5)  # the other rank never replies

    async def check() -> None:
        async with group(tmp_path) as ranks:
            await ranks.ready()
            message = r"(?s)'train rank 1' failed in part.fail_on.*only on this rank.*train\.1\.log"
            with pytest.raises(WorkerDied, match=message):
                await ranks.call("part", "fail_on", 1)
            assert ranks.died.done()
            fault.fired()

    asyncio.run(check())


def test_group_raises_error_of_rank_that_cannot_start(tmp_path: Path) -> None:
    async def check() -> None:
        async with group(tmp_path, build_with_broken_rank) as ranks:
            with pytest.raises(DataError, match="rank 1 cannot start"):
                await ranks.ready()

    asyncio.run(check())


def test_group_ends_started_ranks_when_another_one_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = subprocess.Popen

    def fail_second(*args: Any, **kwargs: Any) -> Any:
        if children():
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(*args, **kwargs)

    async def check() -> None:
        monkeypatch.setattr(subprocess, "Popen", fail_second)
        with pytest.raises(BlockingIOError):
            process_group("train", build, (), ranks=2, threads=1, log_folder=tmp_path)
        await until(lambda: not children())

    asyncio.run(check())


def test_group_counts_messages_of_its_ranks_after_its_death(tmp_path: Path) -> None:
    async def check() -> None:
        async with group(tmp_path) as ranks:
            await ranks.ready()
            ranks.start_call("part", "pid")
            ranks.fence(WorkerDied("unresponsive"))
            await until(lambda: ranks.fenced == 2)

    asyncio.run(check())
