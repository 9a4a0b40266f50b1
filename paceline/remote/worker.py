"""The controller's handle on a worker, wherever it runs: call its parts, receive its events.

The death of a worker is an event: pending calls fail at once with WorkerDied. Messages that arrive
from a worker after it was declared dead are discarded, because a replacement may be running (a
suspended process can continue).
"""

import asyncio
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from paceline.errors import WorkerDied
from paceline.remote.device_clock import ClockReport
from paceline.remote.device_clock import Event as ClockEvent
from paceline.remote.message import Call, Event, Reply

log = logging.getLogger(__name__)

Build = Callable[..., Mapping[str, Any]]  # runs in the worker and returns its parts by name
T = TypeVar("T")
MAX_EVENTS = 100_000  # of its clock, between two polls of the tracer


class Worker(ABC):
    def __init__(self, name: str) -> None:
        self.name = name
        self.node = "local"  # the machine it runs on
        self.host = "127.0.0.1"  # the address where other workers reach it
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fenced = 0  # messages that arrived after its death
        self.clock: ClockReport | None = None  # last report of its device's time
        self._events: deque[ClockEvent] = deque(maxlen=MAX_EVENTS)  # on its clock
        self._ahead_s = math.inf  # of the controller's clock, before the worker's
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._started: asyncio.Future[Any] = self._loop.create_future()
        # What is called, when that was sent, and the reply.
        self._pending: dict[int, tuple[str, float, asyncio.Future[Any]]] = {
            0: ("start", self._loop.time(), self._started)
        }
        self._listeners: dict[str, Callable[[Any], None]] = {}
        self._closing = False

    def listen(self, part: str, listener: Callable[[Any], None]) -> None:
        """Call `listener` with every event of a part."""
        self._listeners[part] = listener

    async def call(self, part: str, method: str, *args: Any) -> Any:
        """Call a part's method and wait for the result. Errors of the method are raised here."""
        return await self.start_call(part, method, *args)

    def start_call(self, part: str, method: str, *args: Any) -> asyncio.Future[Any]:
        """Call a part's method without waiting; the future is the reply (`blocking=False`)."""
        if self.died.done():
            self.died.result()
        call = Call(next(self._ids), part, method, args)
        future = self._loop.create_future()
        self._pending[call.id] = (f"{part}.{method}", self._loop.time(), future)
        try:
            self.send(call)
        except OSError:
            self._dead(None)
        return future

    async def ready(self) -> None:
        await self._started

    def on_time(self, time_s: float) -> float:
        """Return a time of its clock on the controller's. The shortest message tells both."""
        return time_s + self._ahead_s

    def take_events(self) -> list[ClockEvent]:
        """Return what it did since the last call, on the controller's clock, if it says so."""
        events = [(e[0], self.on_time(e[1]), *e[2:]) for e in self._events]
        self._events.clear()
        return events

    @property
    def fenced(self) -> int:
        """Number of messages that arrived after its death and were discarded."""
        return self._fenced

    @property
    def starting(self) -> bool:
        return not self._started.done()

    def waiting_for(self) -> list[str]:
        """Return the calls that have not been answered, and since when. For any thread."""
        now = self._loop.time()
        return [f"{what} for {now - sent:.0f} s" for what, sent, _ in list(self._pending.values())]

    async def peak_memory(self) -> int:
        """Return the peak bytes of its process, or 0 if that is the controller's process."""
        return 0

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def send(self, message: Any) -> None:
        """Send a message to the worker's host."""

    def _exit_details(self) -> str:
        return ""

    def _receive(self, message: Reply | Event) -> None:
        if self.died.done():
            self._fenced += 1
            log.warning("discarding a message from worker %r, which was declared dead", self.name)
            return
        if isinstance(message, Event):
            self._listeners[message.part](message.value)
            return
        if message.clock:
            self._keep(message.clock)
        *_, future = self._pending.pop(message.id)
        if future.done():
            return
        if message.error is not None:
            future.set_exception(message.error)
        else:
            future.set_result(message.value)

    def _keep(self, report: ClockReport) -> None:
        self._ahead_s = min(self._ahead_s, self._loop.time() - report.now)
        self._events.extend(report.events)
        if self.clock is None or report.now > self.clock.now:  # two threads of it may send
            self.clock = report

    def _dead(self, cause: BaseException | None) -> None:
        if self._closing or self.died.done():
            return
        why = f": {type(cause).__name__}: {str(cause).partition(chr(10))[0]}" if cause else ""
        error = WorkerDied(f"worker {self.name!r} died{why}{self._exit_details()}")
        error.__cause__ = cause
        self.fence(error)

    def fence(self, error: WorkerDied) -> None:
        """Declare it dead, whether its process is or not.

        Pending calls fail with `error`, and later messages are discarded.
        """
        if self.died.done():
            return
        self.died.set_exception(error)
        self.died.exception()  # mark as retrieved: every waiter gets it anyway
        for *_, future in self._pending.values():
            if not future.done():
                future.set_exception(error)
        self._pending = {}


def mark_seen(reply: "asyncio.Future[T]") -> "asyncio.Future[T]":
    """Suppress asyncio's complaint about an error that no caller retrieves."""
    reply.add_done_callback(_retrieve)
    return reply


def _retrieve(reply: "asyncio.Future[Any]") -> None:
    if not reply.cancelled():
        reply.exception()
