"""Workers on this machine. On threads of this process roles take turns, except those that have a thread of their own."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import WorkerDied
from paceline.remote.process import ProcessWorker
from paceline.remote.thread import ThreadWorker


class Gate:
    """A part that waits until another one is called."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def wait(self) -> str:
        return "came" if self.opened.wait(10) else "never came"

    def open(self) -> str:
        self.opened.set()
        return threading.current_thread().name


class Homebound(Exception):
    """As many libraries have them: it can be pickled, but not unpickled."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(f"{message} (code {code})")


class Library:
    def fail(self) -> None:
        raise Homebound("the disk is upside down", code=7)


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
        worker = ThreadWorker("main", build, (), beside={"rollout"})
        await worker.ready()
        try:
            await asyncio.wait_for(scenario(worker), 20)
        finally:
            await worker.close()

    asyncio.run(main())


def test_a_role_beside_works_while_the_others_do() -> None:
    gate = Gate()

    async def scenario(worker: ThreadWorker) -> None:
        waiting = worker.start_call("actor", "wait")
        assert await worker.call("rollout", "open") == "main-second"
        assert await waiting == "came"
        assert await worker.call("actor", "open") == "main"

    with_worker(lambda: {"actor": gate, "rollout": gate}, scenario)


def test_a_role_beside_that_fails_takes_the_worker_with_it() -> None:
    async def scenario(worker: ThreadWorker) -> None:
        await worker.call("rollout", "begin")
        with pytest.raises(WorkerDied):
            await worker.died

    with_worker(lambda: {"actor": Gate(), "rollout": Broken()}, scenario)


def test_a_process_that_is_still_starting_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario() -> float:
        worker = ProcessWorker(
            "slow", time.sleep, (60,), cores=[], threads=1, log_path=tmp_path / "log"
        )  # type: ignore[arg-type]
        begun = time.monotonic()
        await worker.close()
        return time.monotonic() - begun

    assert asyncio.run(scenario()) < 4


@pytest.mark.parametrize("works", [True, False])
def test_an_error_that_cannot_travel_is_told_in_its_words(works: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = ProcessWorker(
            "one", build_library, (works,), cores=[], threads=1, log_path=tmp_path / "log"
        )
        try:
            async with asyncio.timeout(30):
                with pytest.raises(
                    RuntimeError, match=r"Homebound: the disk is upside down \(code 7\)"
                ):
                    await worker.ready()
                    await worker.call("actor", "fail")
        finally:
            await worker.close()

    asyncio.run(scenario())
