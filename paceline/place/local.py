"""Workers on this machine: each pool is a process with its own cores, or a thread when there is only one pool.

A worker's death is an event: pending calls fail at once with WorkerDied, which carries the last lines of its log.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.errors import WorkerDied
from paceline.place.host import ThreadChannel, serve
from paceline.place.message import Call, Event, Reply

log = logging.getLogger(__name__)

Build = Callable[..., Mapping[str, Any]]


class Worker(ABC):
    """The controller's handle on a worker: call its parts, hear its events, learn of its death."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[str, asyncio.Future[Any]]] = {0: ("start", self._loop.create_future())}
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
        error = WorkerDied(f"worker {self.name!r} died{self._last_words()}")
        error.__cause__ = cause
        self.died.set_exception(error)
        self.died.exception()  # mark as seen: those who wait get it anyway
        for _, future in self._pending.values():
            if not future.done():
                future.set_exception(error)
        self._pending = {0: self._pending[0]} if 0 in self._pending else {}


class ThreadWorker(Worker):
    """A worker on a thread of this process: the hybrid engine, where generation and training share memory."""

    def __init__(self, name: str, build: Build, args: tuple[Any, ...]) -> None:
        super().__init__(name)
        self._channel = ThreadChannel()
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
            serve(self._channel, parts)
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
                return  # the event loop is closed; nobody listens any more
            if isinstance(message, BaseException):
                return

    def _send(self, message: Any) -> None:
        self._channel.inbox.put(message)

    async def close(self) -> None:
        self._closing = True
        self._send(None)
        await asyncio.to_thread(self._host.join, 10)
        self._channel.outbox.put(None)


class ProcessWorker(Worker):
    """A worker in a process of its own, pinned to its cores."""

    def __init__(self, name: str, build: Build, args: tuple[Any, ...], *, cores: list[int], threads: int, log_path: Path) -> None:
        super().__init__(name)
        self._log_path = log_path
        ours, theirs = socket.socketpair()
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        with log_path.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline.place.host", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        theirs.close()
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self.process.pid, cores)
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._connection.send((build, args))
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while True:
                self._loop.call_soon_threadsafe(self._receive, self._connection.recv())
        except (EOFError, OSError):
            pass
        self.process.wait()
        try:
            self._loop.call_soon_threadsafe(self._dead, None)
        except RuntimeError:
            return  # the event loop is closed; nobody listens any more

    async def peak_memory(self) -> int:
        peak: int = await self.call("host", "peak_memory")
        return peak

    def _send(self, message: Any) -> None:
        self._connection.send(message)

    def _last_words(self) -> str:
        code = self.process.returncode
        how = f" (killed by signal {-code})" if code is not None and code < 0 else f" (exit code {code})"
        return how + self.last_lines()

    def last_lines(self) -> str:
        """The end of its log, to be added to a message."""
        lines = self._log_path.read_text(errors="replace").splitlines()[-8:] if self._log_path.exists() else []
        return f"; last lines of {self._log_path}:\n  " + "\n  ".join(lines) if lines else ""

    async def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._send(None)
        try:
            await asyncio.to_thread(self.process.wait, 5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        await asyncio.to_thread(self._reader.join, 5)
        self._connection.close()
