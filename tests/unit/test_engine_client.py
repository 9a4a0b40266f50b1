"""Engine client: overlapping pause and resume calls, and failed submissions."""

import asyncio
from typing import Any

import pytest

from paceline.errors import WorkerDied
from paceline.remote.message import Call, Reply
from paceline.remote.worker import Worker
from paceline.rollout.client import EngineClient
from paceline.types import OnSync, Request, Sampling
from tests.virtual import run_virtual


class SlowWorker(Worker):
    """Replies to every call after one second, in order."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("slow")
        self.calls: list[str] = []
        self._error = error

    def send(self, message: Call) -> None:
        self.calls.append(message.method)
        self._loop.call_later(1.0, self._receive, Reply(message.id, [], self._error))

    async def close(self) -> None:
        return


def test_late_reply_to_resume_does_not_undo_later_pause() -> None:
    async def scenario() -> Any:
        worker = SlowWorker()
        engine = EngineClient(worker)
        await engine.pause(OnSync.INTERRUPT)
        resuming = asyncio.ensure_future(engine.resume())
        await asyncio.sleep(0.5)
        pausing = asyncio.ensure_future(engine.pause(OnSync.INTERRUPT))
        await asyncio.gather(resuming, pausing)
        request = asyncio.ensure_future(engine.generate(Request("1", (1,), 0, Sampling(4))))
        await asyncio.sleep(10)
        assert "submit" not in worker.calls, "a request was submitted while paused"
        await engine.resume()
        await asyncio.sleep(1)
        request.cancel()
        await asyncio.wait({request})
        return worker.calls

    assert run_virtual(scenario()) == [
        "interrupt",
        "resume",
        "interrupt",
        "resume",
        "submit",
        "abort",
    ]


def test_requests_fail_when_submit_raises() -> None:
    async def scenario() -> None:
        engine = EngineClient(SlowWorker(KeyError("a bug")))
        with pytest.raises(KeyError, match="a bug"):
            async with asyncio.timeout(5):
                await engine.generate(Request("1", (1,), 0, Sampling(4)))

    run_virtual(scenario())


def test_request_is_accepted_from_confirmation_until_end() -> None:
    async def scenario() -> None:
        worker = SlowWorker()
        engine = EngineClient(worker)
        first, second = (
            asyncio.ensure_future(engine.generate(Request(name, (1,), 0, Sampling(4))))
            for name in "12"
        )
        await asyncio.sleep(0.5)
        assert not engine.accepted("1"), "the engine may have been dead when it was sent"
        await asyncio.sleep(1)
        assert engine.accepted("1") and engine.accepted("2")
        first.cancel()
        await asyncio.wait({first})
        worker.fence(WorkerDied("planted"))
        await asyncio.wait({second})
        assert isinstance(second.exception(), WorkerDied)
        assert not engine.accepted("1") and engine.accepted("2")

    run_virtual(scenario())
