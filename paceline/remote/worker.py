"""The controller's handle on a worker, wherever it runs: the only thing the rest of the system sees of a place.

A worker's death is an event: pending calls fail at once with WorkerDied, and whatever a worker says after it was declared dead is
refused, since another may have taken its place (a stopped process can wake up again).
"""

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import WorkerDied
from paceline.remote.message import Call, Event, Reply

log = logging.getLogger(__name__)

Build = Callable[..., Mapping[str, Any]]


class Worker(ABC):
    """Call its parts, hear its events, learn of its death."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.node = "local"  # the machine it runs on
        self.host = "127.0.0.1"  # where others can reach it
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.fenced = 0  # messages that came after its death
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[str, asyncio.Future[Any]]] = {
            0: ("start", self._loop.create_future())
        }
        self._listeners: dict[str, Callable[[Any], None]] = {}
        self._closing = False

    def listen(self, role: str, listener: Callable[[Any], None]) -> None:
        self._listeners[role] = listener

    async def call(self, role: str, method: str, *args: Any) -> Any:
        """Call a part's method and wait for the result. Errors of the method are raised here."""
        return await self.start_call(role, method, *args)

    def start_call(self, role: str, method: str, *args: Any) -> asyncio.Future[Any]:
        """The same without waiting: the future is the answer (`blocking=False`)."""
        if self.died.done():
            self.died.result()
        call = Call(next(self._ids), role, method, args)
        future = self._loop.create_future()
        self._pending[call.id] = (f"{role}.{method}", future)
        try:
            self._send(call)
        except OSError:
            self._dead(None)
        return future

    async def ready(self) -> None:
        """Wait until the worker has built its parts."""
        await self._pending[0][1]
        del self._pending[0]

    @property
    def starting(self) -> bool:
        return 0 in self._pending and not self._pending[0][1].done()

    def waiting_for(self) -> list[str]:
        return [what for what, _ in self._pending.values()]

    async def peak_memory(self) -> int:
        """Most bytes its process ever held; 0 when that is the controller's own."""
        return 0

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def _send(self, message: Any) -> None: ...

    def _last_words(self) -> str:
        return ""

    def _receive(self, message: Reply | Event) -> None:
        if self.died.done():
            self.fenced += 1
            log.warning("worker %r was declared dead; what it says now is refused", self.name)
            return
        if isinstance(message, Event):
            self._listeners[message.role](message.value)
            return
        _, future = self._pending[message.id] if message.id == 0 else self._pending.pop(message.id)
        if future.done():
            return
        if message.error is not None:
            future.set_exception(message.error)
        else:
            future.set_result(message.value)

    def _dead(self, cause: BaseException | None) -> None:
        if self._closing or self.died.done():
            return
        why = f" of {type(cause).__name__}: {str(cause).partition(chr(10))[0]}" if cause else ""
        error = WorkerDied(f"worker {self.name!r} died{why}{self._last_words()}")
        error.__cause__ = cause
        self.fence(error)

    def fence(self, error: WorkerDied) -> None:
        """Declare it dead, whether its process is or not: pending calls fail with this, and nothing it says from here on counts."""
        if self.died.done():
            return
        self.died.set_exception(error)
        self.died.exception()  # mark as seen: those who wait get it anyway
        for _, future in self._pending.values():
            if not future.done():
                future.set_exception(error)
        self._pending = {0: self._pending[0]} if 0 in self._pending else {}


def seen(answer: asyncio.Future[Any]) -> None:
    """Errors are read by those who wait; when nobody does any more there is nothing to complain of."""
    if not answer.cancelled():
        answer.exception()
