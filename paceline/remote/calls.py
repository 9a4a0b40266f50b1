"""Calls of user code that are in flight in one process or thread, with their deadlines."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GRACE_S = 1.0  # for an event loop to cancel a call and to report that
POLL_INTERVAL_S = 0.5


class Overdue(Exception):
    """The call was cancelled at its deadline; its event loop continues."""


class Lost(Exception):
    """The process or thread of the call does not respond or has exited."""


class Hung(Lost):
    """The call exceeded its deadline, and nothing responds."""


class Interrupted(Lost):
    """Another call in the same process or thread hung. A retry is safe."""


class Died(Lost):
    """The process has exited. The cause may be external (the OOM killer), so a retry can work."""


@dataclass(slots=True)
class _Call:
    future: asyncio.Future[Any]
    since: float  # when it was sent, then when the function started on it
    started: bool = False


class Calls:
    """Futures of the calls in one process or thread.

    The deadline of a call starts when the function starts on it. Where starts are not reported, the
    calls run one after another, so each starts when the previous one ends.
    """

    def __init__(self, allowed_s: float, on_hang: Callable[[], None]) -> None:
        """Call `on_hang` after the calls have failed because one of them took too long."""
        self._loop = asyncio.get_running_loop()
        self._allowed_s, self._on_hang = allowed_s, on_hang
        self._calls: dict[int, _Call] = {}
        self._last_reply = 0.0
        self._next = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def add(self) -> tuple[int, asyncio.Future[Any]]:
        """Return the number and the future of a new call."""
        number, self._next = self._next, self._next + 1
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls[number] = _Call(future, self._loop.time())
        if self._timer is None:
            self._wake_at(self._loop.time() + self._allowed_s)
        return number, future

    def started(self, number: int) -> None:
        self._last_reply = self._loop.time()
        if call := self._calls.get(number):
            call.since, call.started = self._last_reply, True

    def finish(self, number: int, result: Any) -> None:
        self._last_reply = self._loop.time()
        if call := self._calls.pop(number, None):
            _settle(call.future, result)

    def fail(self, error: Exception) -> None:
        """Fail all calls."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            _settle(call.future, error)

    def _check(self) -> None:
        self._timer = None
        now = self._loop.time()
        due = {number: self._due(call) for number, call in self._calls.items()}
        hung = [number for number, time in due.items() if time <= now]
        if hung:
            # A call that blocks the others has started, where starts are reported.
            started = [number for number in hung if self._calls[number].started]
            for number in started or hung:
                self.finish(number, Hung())
            self.fail(Interrupted())
            self._on_hang()
        elif due:
            self._wake_at(min(due.values()))

    def _wake_at(self, time: float) -> None:
        # The clock recognizes a suspended process only by a wait that is longer than planned.
        next_time = min(time, self._loop.time() + POLL_INTERVAL_S)
        self._timer = self._loop.call_at(next_time, self._check)

    def _due(self, call: _Call) -> float:
        since = call.since if call.started else max(call.since, self._last_reply)
        return since + self._allowed_s


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return  # it was cancelled
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
