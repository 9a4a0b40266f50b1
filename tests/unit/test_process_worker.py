"""A worker process whose answers cannot be read is a dead one, with the reason: nobody waits for it for ever."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import WorkerDied
from paceline.remote.process import ProcessWorker
from tests.processes import children


def refuse() -> None:
    raise ValueError("this is not for you")


class Unreadable:
    def __reduce__(self) -> Any:
        return refuse, ()


class Part:
    def say(self) -> Unreadable:
        return Unreadable()


def build() -> Mapping[str, Any]:
    return {"part": Part()}


def test_an_answer_that_cannot_be_read_ends_the_worker_with_the_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = ProcessWorker("odd", build, (), cores=[], threads=1, log_path=tmp_path / "log")
        try:
            async with asyncio.timeout(30):
                await worker.ready()
                with pytest.raises(
                    WorkerDied, match="worker 'odd' died of ValueError: this is not for you"
                ):
                    await worker.call("part", "say")
        finally:
            await worker.close()

    asyncio.run(scenario())
    assert not children()
