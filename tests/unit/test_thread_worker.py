"""Workers on this machine. On a thread, roles alternate, except those with a second thread."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import WorkerDied
from paceline.remote.parts import Parts
from paceline.remote.process import ProcessWorker
from paceline.remote.thread import ThreadWorker


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


def with_worker(
    build: Callable[[], dict[str, Any]],
    scenario: Callable[[ThreadWorker], Coroutine[Any, Any, None]],
) -> None:
    async def main() -> None:
        worker = ThreadWorker("main", lambda: Parts(build(), {"rollout"}), ())
        await worker.ready()
        try:
            await asyncio.wait_for(scenario(worker), 100)
        finally:
            await worker.close()

    asyncio.run(main())


def test_concurrent_role_works_while_other_role_waits() -> None:
    gate = Gate()

    async def scenario(worker: ThreadWorker) -> None:
        waiting = worker.start_call("actor", "wait")
        assert await worker.call("rollout", "open") == "main-second"
        assert await waiting == "opened"
        assert await worker.call("actor", "open") == "main-first"

    with_worker(lambda: {"actor": gate, "rollout": gate}, scenario)


def test_worker_dies_when_concurrent_role_fails() -> None:
    async def scenario(worker: ThreadWorker) -> None:
        await worker.call("rollout", "begin")
        with pytest.raises(WorkerDied):
            await worker.died

    with_worker(lambda: {"actor": Gate(), "rollout": Broken()}, scenario)


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
def test_error_keeps_its_message_when_it_cannot_be_unpickled(works: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = ProcessWorker(
            "one", build_library, (works,), cores=[], threads=1, log_path=tmp_path / "log"
        )
        try:
            async with asyncio.timeout(120):
                message = r"UnpicklableError: the disk is full \(code 7\)"
                with pytest.raises(RuntimeError, match=message):
                    await worker.ready()
                    await worker.call("actor", "fail")
        finally:
            await worker.close()

    asyncio.run(scenario())


def build_gates() -> Parts:
    gate = Gate()
    return Parts({"actor": gate, "rollout": gate}, {"rollout"})


def build_broken() -> Parts:
    return Parts({"actor": Gate(), "rollout": Broken()}, {"rollout"})


def test_concurrent_role_of_process_works_while_other_role_waits(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = ProcessWorker(
            "one", build_gates, (), cores=[], threads=1, log_path=tmp_path / "log"
        )
        try:
            async with asyncio.timeout(120):
                await worker.ready()
                waiting = worker.start_call("actor", "wait")
                assert (await worker.call("rollout", "open")).endswith("second")
                assert await waiting == "opened"
        finally:
            await worker.close()

    asyncio.run(scenario())


def test_process_dies_when_concurrent_role_fails(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = ProcessWorker(
            "one", build_broken, (), cores=[], threads=1, log_path=tmp_path / "log"
        )
        try:
            async with asyncio.timeout(120):
                await worker.ready()
                await worker.call("rollout", "begin")
                with pytest.raises(WorkerDied, match="a bug"):
                    await worker.died
        finally:
            await worker.close()

    asyncio.run(scenario())


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
