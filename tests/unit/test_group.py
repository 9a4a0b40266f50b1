"""A group of ranks answers like one worker, and goes down as one."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError, WorkerDied
from paceline.remote.group import WorkerGroup
from paceline.remote.process import process_group
from tests.processes import children


class Part:
    def total(self, number: int) -> int:
        """A number from each rank, added up by all."""
        import torch
        import torch.distributed as dist

        value = torch.tensor(number + dist.get_rank())
        dist.all_reduce(value)
        return int(value)

    def refuse(self) -> None:
        raise DataError("no rank wants this")

    def fail_on(self, rank: int) -> None:
        import torch.distributed as dist

        if dist.get_rank() == rank:
            raise RuntimeError("only here")
        dist.barrier()

    def pid(self) -> int:
        return os.getpid()


def build() -> Mapping[str, Any]:
    import torch.distributed as dist

    return {"part": Part(), "first": Part()} if dist.get_rank() == 0 else {"part": Part()}


def build_with_a_broken_rank() -> Mapping[str, Any]:
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


def test_ranks_answer_as_one_and_an_error_of_all_is_only_the_calls(tmp_path: Path) -> None:
    async def check() -> None:
        async with group(tmp_path) as ranks:
            await ranks.ready()
            answers = [ranks.start_call("part", "total", number) for number in range(5)]
            assert await asyncio.gather(*answers) == [2 * number + 1 for number in range(5)]
            assert await ranks.call("first", "pid") == ranks.ranks[0].process.pid
            with pytest.raises(DataError, match="no rank wants this"):
                await ranks.call("part", "refuse")
            assert await ranks.call("part", "total", 1) == 3
            assert await ranks.peak_memory() > 100e6

    asyncio.run(check())


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_group_with_its_name_and_leaves_nobody_behind(
    victim: int, tmp_path: Path
) -> None:
    async def check() -> None:
        async with group(tmp_path) as ranks:
            await ranks.ready()
            started = time.monotonic()
            waiting = ranks.start_call(
                "part", "fail_on", 7
            )  # a barrier that the other rank waits in if this one is killed
            os.kill(ranks.ranks[victim].process.pid, signal.SIGKILL)
            following = ranks.start_call("part", "total", 1)
            for answer in (waiting, following):
                with pytest.raises(
                    WorkerDied, match=f"worker 'train rank {victim}' died .killed by signal 9"
                ):
                    await answer
                    await ranks.call("part", "total", 1)
            with pytest.raises(WorkerDied, match=f"rank {victim}"):
                await ranks.call("part", "total", 1)
            assert time.monotonic() - started < 10

    asyncio.run(check())


def test_a_rank_that_fails_alone_ends_the_group_with_its_last_lines(tmp_path: Path) -> None:
    async def check() -> None:
        async with group(tmp_path) as ranks:
            await ranks.ready()
            with pytest.raises(
                WorkerDied,
                match=r"(?s)'train rank 1' failed in part.fail_on.*only here.*train\.1\.log",
            ):
                await ranks.call("part", "fail_on", 1)
            assert ranks.died.done()

    asyncio.run(check())


def test_a_rank_that_cannot_start_is_the_groups_error(tmp_path: Path) -> None:
    async def check() -> None:
        async with group(tmp_path, build_with_a_broken_rank) as ranks:
            with pytest.raises(DataError, match="rank 1 cannot start"):
                await ranks.ready()

    asyncio.run(check())
