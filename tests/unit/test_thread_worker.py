"""Workers on this machine. Their roles alternate, except those with a second thread."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import WorkerDied
from paceline.remote.parts import Parts
from paceline.remote.process import ProcessWorker
from paceline.remote.thread import ThreadWorker
from paceline.remote.worker import Build, Worker
from tests.event_loops import in_loop
from tests.processes import started

Start = Callable[[Build, Path], AbstractAsyncContextManager[Worker]]


class Gate:
    """A part whose `wait` returns when `open` is called."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def wait(self) -> str:
        return "opened" if self.opened.wait(60) else "timed out"

    def open(self) -> str:
        self.opened.set()
        return threading.current_thread().name


class UnpicklableError(Exception):
    """An error that can be pickled but not unpickled, as many libraries have them."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(f"{message} (code {code})")


class Library:
    def fail(self) -> None:
        raise UnpicklableError("the disk is full", code=7)


def build_library(works: bool) -> dict[str, Any]:
    if not works:
        Library().fail()
    return {"actor": Library()}


class Broken:
    def __init__(self) -> None:
        self.start = False

    def begin(self) -> None:
        self.start = True

    def work(self) -> list[Any] | None:
        if self.start:
            raise ValueError("a bug")
        return None


def build_gates() -> Parts:
    gate = Gate()
    return Parts({"actor": gate, "rollout": gate}, {"rollout"})


def build_broken() -> Parts:
    return Parts({"actor": Gate(), "rollout": Broken()}, {"rollout"})


@asynccontextmanager
async def on_thread(build: Build, log_path: Path) -> AsyncIterator[ThreadWorker]:
    worker = ThreadWorker("main", build, ())
    try:
        async with asyncio.timeout(120):
            await worker.ready()
            yield worker
    finally:
        await worker.close()


@pytest.mark.parametrize("start", [on_thread, started], ids=["thread", "process"])
@in_loop
async def test_concurrent_role_works_while_other_role_waits(start: Start, tmp_path: Path) -> None:
    async with start(build_gates, tmp_path / "log") as worker:
        waiting = worker.start_call("actor", "wait")
        assert (await worker.call("rollout", "open")).endswith("second")
        assert await waiting == "opened"
        assert not (await worker.call("actor", "open")).endswith("second")


@pytest.mark.parametrize("start", [on_thread, started], ids=["thread", "process"])
@in_loop
async def test_worker_dies_when_concurrent_role_fails(start: Start, tmp_path: Path) -> None:
    async with start(build_broken, tmp_path / "log") as worker:
        await worker.call("rollout", "begin")
        with pytest.raises(WorkerDied, match="a bug"):
            await worker.died


def test_close_does_not_wait_for_process_that_is_starting(tmp_path: Path) -> None:
    async def scenario() -> float:
        build: Any = time.sleep
        worker = ProcessWorker(
            "slow", build, (600,), cores=[], threads=1, log_path=tmp_path / "log"
        )
        started = time.monotonic()
        await worker.close()
        return time.monotonic() - started

    assert asyncio.run(scenario()) < 60


@pytest.mark.parametrize("works", [True, False])
@in_loop
async def test_error_keeps_its_message_when_it_cannot_be_unpickled(
    works: bool, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=r"UnpicklableError: the disk is full \(code 7\)"):
        async with started(build_library, tmp_path / "log", works) as worker:
            await worker.call("actor", "fail")


def test_pending_calls_are_described_from_another_thread_while_they_are_answered() -> None:
    async def scenario() -> None:
        worker = ThreadWorker("busy", lambda: {"gate": Gate()}, ())
        errors, ended = list[Exception](), threading.Event()

        def describe() -> None:
            try:
                while not ended.is_set():
                    worker.waiting_for()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=describe)
        thread.start()
        try:
            await worker.ready()
            for _ in range(50):
                await asyncio.gather(*(worker.start_call("gate", "open") for _ in range(100)))
        finally:
            ended.set()
            thread.join()
            await worker.close()
        assert not errors

    asyncio.run(scenario())
