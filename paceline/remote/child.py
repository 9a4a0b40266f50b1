"""A process that runs user code, as its parent sees it. It can be killed with all its descendants.

Requests go to it pickled over a private socket. Replies come back as lines of JSON, because the
code in it is not trusted. The event loop of the run reads them, so that no thread has to wait.
remote/link.py is the other end.
"""

import asyncio
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from paceline.remote.calls import Calls, Died, Interrupted, Lost
from paceline.remote.descendants import VARIABLE, kill_descendants, new_mark
from paceline.remote.parent import is_suspended
from paceline.remote.peak import peak_memory_of
from paceline.remote.stacks import read_from

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0  # user code may import torch
READ_S = 0.5  # to read what a process has sent before it exited
EXIT_TIMEOUT_S = 1.0  # lets a process flush its files

MAX_REPLY = 16 << 20  # bytes
MAX_OUTPUT = 1 << 20  # bytes of prints in the log, every OUTPUT_S seconds; the rest is discarded
OUTPUT_S = 10.0
# What a reply raises that the worker has not written: user code shares its process.
INVALID = (
    *(ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError),
    asyncio.InvalidStateError,
)


class Child(asyncio.Protocol):
    """The process, its connection and the calls that are in flight there."""

    def __init__(
        self,
        kind: str,
        name: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        allowed_s: float,
    ) -> None:
        """Start `python -m module FD PARENT_PID STACKS_FD arguments`.

        `kind` and `name` are for messages. A call may take `allowed_s` before the process counts as
        hung.
        """
        self.kind, self.name = kind, name
        self.mark = new_mark()  # of the process and its descendants
        self.suspended = False  # when a call hung, so the code is not to blame
        self.calls = Calls(allowed_s, self._hang)
        self._lost: Lost | None = None
        self._problem = ""  # why the connection was closed
        self._unread = b""
        self._transport: asyncio.Transport | None = None
        self._exit_fd: int | None = None  # readable once the process has exited
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[bool] = self._loop.create_future()
        self._loaded.add_done_callback(lambda loaded: loaded.cancelled() or loaded.exception())
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the process is lost)
        self._socket, remote = socket.socketpair()
        with remote:
            try:
                self.process = self._start(remote.fileno(), module, arguments, environment)
            except BaseException:
                self._socket.close()
                self._stacks.close()
                raise
        threading.Thread(target=self._relay, daemon=True, name=f"{kind}-output").start()

    def _start(
        self, fd: int, module: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        stacks = self._stacks.fileno()
        numbers = map(str, (fd, os.getpid(), stacks))
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        # The kernel kills the process when the thread that started it ends (see remote/parent.py).
        # It is the thread of the event loop, which outlives the pool.
        return subprocess.Popen(
            [sys.executable, "-m", module, *numbers, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[fd, stacks],
            start_new_session=True,  # a separate process group can be killed as a whole
            env={
                **environment,
                VARIABLE: self.mark,
                "PYTHONPATH": path,
                "PYTHONUNBUFFERED": "1",
                "OMP_NUM_THREADS": "1",
            },
        )

    async def connect(self) -> None:
        self._transport, _ = await self._loop.create_unix_connection(
            lambda: self, sock=self._socket
        )
        # A child of the process may keep the connection open after the process has exited.
        with suppress(OSError, AttributeError):  # too many open files, or not Linux
            self._exit_fd = os.pidfd_open(self.process.pid)
            self._loop.add_reader(self._exit_fd, self._exited)

    async def ready(self) -> bool:
        """Wait until the code is loaded. Return whether its calls run concurrently.

        Raises ConfigError if it cannot be loaded and Died if the process exits or hangs.
        """
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await asyncio.shield(self._loaded)
        except TimeoutError:
            raise Died(f"it did not load within {START_TIMEOUT_S:g} s") from None

    def check(self) -> None:
        """Raise Lost if the process has exited or hangs."""
        if self._lost is not None or self._transport is None:
            raise self._lost or Interrupted()

    def send(self, message: Any) -> None:
        """Send a message. Raises Lost if the process has exited or hangs."""
        self.check()
        assert self._transport is not None
        self._transport.write(pickle.dumps(message))

    def disconnect(self) -> None:
        """Close the connection, so that an idle process exits normally and flushes its files."""
        if self._transport is not None:
            self._transport.close()

    def wait(self, seconds: float) -> None:
        """Wait briefly for a disconnected process to exit."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def kill(self) -> None:
        kill_all([self])

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name!r}, process {self.process.pid}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask_stacks(self) -> Callable[[], str]:
        """Ask the process for its stacks; return a function that returns what has arrived."""
        size = 0
        with suppress(OSError, ValueError):  # it has exited, and the file is closed
            size = os.fstat(self._stacks.fileno()).st_size
            self.process.send_signal(signal.SIGUSR1)
        return lambda: read_from(self._stacks, size)

    def peak_memory(self) -> int:
        """Return the peak resident bytes of the process (Linux; elsewhere 0)."""
        return peak_memory_of(self.process.pid)

    def data_received(self, data: bytes) -> None:
        *lines, self._unread = (self._unread + data).split(b"\n")
        try:
            for line in lines:
                self._receive(json.loads(line))
            if len(self._unread) > MAX_REPLY:
                raise ValueError(f"more than {MAX_REPLY} bytes without an end")
        except INVALID as error:
            self._problem = f"it sent an invalid reply: {error}"
            log.warning("%s %r: an invalid reply: %s", self.kind, self.name, error)
            assert self._transport is not None
            self._transport.abort()  # as if the process had exited: it is replaced

    @abstractmethod
    def _receive(self, message: dict[str, Any]) -> None:
        """Handle a reply. What it raises of INVALID ends the process."""

    def _exited(self) -> None:
        self._forget_exit()
        if self._transport is not None:  # the last replies may not have been read yet
            self._loop.call_later(READ_S, self._transport.abort)

    def _forget_exit(self) -> None:
        if self._exit_fd is not None:
            self._loop.remove_reader(self._exit_fd)
            os.close(self._exit_fd)
            self._exit_fd = None

    def connection_lost(self, error: Exception | None) -> None:
        self._forget_exit()
        self._stacks.close()
        self._reporting = self._loop.create_task(self._report_death())

    def _hang(self) -> None:
        self._lost = Interrupted()  # no new calls until it has been replaced
        self.suspended = is_suspended(self.process.pid)

    async def _report_death(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, EXIT_TIMEOUT_S)
        died = Died(self._problem or f"its process ended with {_exit(self.process.returncode)}")
        self._lost = self._lost or died
        self.calls.fail(died)
        if not self._loaded.done():
            self._loaded.set_exception(died)

    def _relay(self) -> None:
        """Copy what the code prints to the log."""
        assert self.process.stdout is not None
        since, size = time.monotonic(), 0
        with self.process.stdout as output, suppress(ValueError, OSError):
            while line := output.readline(4096):
                if time.monotonic() > since + OUTPUT_S:
                    since, size = time.monotonic(), 0
                size += len(line)
                if size <= MAX_OUTPUT:
                    log.info("%s output: %s", self.kind, line.decode(errors="replace").rstrip())
                elif size - len(line) <= MAX_OUTPUT:
                    log.warning(
                        "%s: more than %d bytes of output in %g s; discarding the rest",
                        *(self.title, MAX_OUTPUT, OUTPUT_S),
                    )


def kill_all(processes: Sequence[Child]) -> None:
    """Kill processes with all their descendants."""
    pids = [process.process.pid for process in processes if process.process.poll() is None]
    for pid in pids:  # stopped, a process adopts orphans but starts nothing more
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    kill_descendants(pids, [process.mark for process in processes])
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    for process in processes:
        process.process.wait()


def end_all(idle: Sequence[Child], busy: Sequence[Child]) -> None:
    """Kill the busy processes, and the idle ones that do not exit soon after `disconnect`."""
    kill_all(busy)
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for process in idle:
        process.wait(max(0.0, deadline - time.monotonic()))
    kill_all(idle)


def _exit(code: int | None) -> str:
    if code is None:
        return "its connection closed"
    names = {number.value: number.name for number in signal.Signals}  # not all signals have one
    return f"signal {names.get(-code, -code)}" if code < 0 else f"exit code {code}"
