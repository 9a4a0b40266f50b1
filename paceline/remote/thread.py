"""A worker on a thread of the controller, where engine and trainer share memory (hybrid)."""

import asyncio
import logging
import sys
import threading
from collections.abc import Collection, Mapping
from typing import Any

from paceline.remote.host import ThreadChannel, serve
from paceline.remote.message import Call, Reply
from paceline.remote.worker import Build, Worker

log = logging.getLogger(__name__)

# A worker's thread takes the interpreter lock between any two operations; with the default interval
# of 5 ms it would wait for the controller.
SWITCH_S = 2e-4


class ThreadWorker(Worker):
    """A worker on a thread of this process. Parts in `concurrent` run on a second thread."""

    def __init__(
        self, name: str, build: Build, args: tuple[Any, ...], concurrent: Collection[str] = ()
    ) -> None:
        super().__init__(name)
        self._channel, self._second = ThreadChannel(), ThreadChannel()
        self._second.outbox = self._channel.outbox
        self._concurrent = frozenset(concurrent)
        sys.setswitchinterval(SWITCH_S)
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
            first = {role: part for role, part in parts.items() if role not in self._concurrent}
            second = {role: part for role, part in parts.items() if role in self._concurrent}
            thread = threading.Thread(
                target=self._serve_second, args=(second,), name=f"{self.name}-second", daemon=True
            )
            if second:
                thread.start()
            self._channel.send(Reply(0))
            serve(self._channel, first)
            if second:
                thread.join()
            self._channel.send(None)
        except BaseException as error:
            log.exception("worker %s failed", self.name)
            self._channel.send(error)

    def _serve_second(self, parts: Mapping[str, Any]) -> None:
        try:
            serve(self._second, parts)
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
        if message is None:
            self._second.inbox.put(None)
        second = isinstance(message, Call) and message.part in self._concurrent
        (self._second if second else self._channel).inbox.put(message)

    async def close(self) -> None:
        self._closing = True
        self.send(None)
        await asyncio.to_thread(self._host.join, 10)
        self._channel.outbox.put(None)
