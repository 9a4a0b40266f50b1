"""A worker on a thread of the controller, where engine and trainer share memory (hybrid)."""

import asyncio
import logging
import sys
import threading
from typing import Any

from paceline.openmp import end_idle_threads
from paceline.remote.host import SWITCH_S, ProcessStats, ThreadChannel, serve_parts
from paceline.remote.message import Reply
from paceline.remote.parts import Parts, clock_of, concurrent_parts
from paceline.remote.worker import Build, Worker

log = logging.getLogger(__name__)


class ThreadWorker(Worker):
    """A worker on a thread of this process."""

    def __init__(self, name: str, build: Build, args: tuple[Any, ...]) -> None:
        super().__init__(name)
        self._channel = ThreadChannel()
        sys.setswitchinterval(SWITCH_S)
        end_idle_threads()
        self._host = threading.Thread(target=self._run, args=(build, args), name=name, daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self._host.start()
        self._reader.start()

    def _run(self, build: Build, args: tuple[Any, ...]) -> None:
        try:
            try:
                parts = build(*args)
            except Exception as error:
                self._channel.send(Reply(0, error=error))
                return
            self._channel.send(Reply(0))
            clock = clock_of(parts)
            parts = Parts({**parts, "host": ProcessStats()}, concurrent_parts(parts), clock)
            serve_parts(self._channel, parts)
            self._channel.send(None)
        except BaseException as error:
            log.exception("worker %s failed", self.name)
            self._channel.send(error)

    def _read(self) -> None:
        while (message := self._channel.outbox.get()) is not None:
            target = self._dead if isinstance(message, BaseException) else self._receive
            try:
                self._loop.call_soon_threadsafe(target, message)
            except RuntimeError:
                return  # the event loop is closed
            if isinstance(message, BaseException):
                return

    def send(self, message: Any) -> None:
        self._channel.inbox.put(message)

    async def close(self) -> None:
        self._closing = True
        self.send(None)
        await asyncio.to_thread(self._host.join, 10)
        self._channel.outbox.put(None)
