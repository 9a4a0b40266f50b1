"""Watches one program in the sandbox: reads its output, and ends it at the first limit it hits."""

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.sandbox.memory import exceeds

START_TIMEOUT_S = 20.0
END_TIMEOUT_S = 2.0  # for the kernel to end all processes of a killed sandbox
POLL_S = 0.05  # how often memory and processes are counted

Limit = Literal["time", "cpu", "output", "memory", "processes"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use. Memory and CPU time hold for each process, memory also for all."""

    timeout_s: float
    cpu_s: float
    memory_mb: int
    processes: int
    output_kb: int
    disk_mb: int


@dataclass(frozen=True, slots=True)
class Result:
    """What a program did."""

    stdout: str
    stderr: str
    exit_code: int
    """0 to 127, or 128 + the number of the signal that ended the program."""
    stopped: Limit | None
    """The limit at which the program was killed. "memory" is that of all processes; one process
    that exceeds it gets a MemoryError."""
    sandbox: Literal["bubblewrap", "weak"]

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.stopped is None

    @property
    def timed_out(self) -> bool:
        return self.stopped == "time"

    @property
    def truncated(self) -> bool:
        """The program was killed because it printed too much."""
        return self.stopped == "output"


class NotStarted(Exception):
    """The sandbox failed before the program began."""


def supervise(
    process: "subprocess.Popen[bytes]",
    ready: int,
    limits: Limits,
    sandbox: Literal["bubblewrap", "weak"],
    ended: threading.Event | None = None,
) -> Result:
    """Wait for the program, kill what is left of it and return what it did. Raises NotStarted.

    `ended` ends it early, as if its time was over.
    """
    try:
        watch = _Watch(process, ready, limits, ended)
    except BaseException:  # no descriptors left
        process.kill()
        process.wait()
        raise
    try:
        watch.follow()
    finally:
        watch.end()
    stdout, stderr = (bytes(output).decode(errors="replace") for output in watch.outputs)
    if not watch.started:
        raise NotStarted(stderr.strip() or f"no start within {START_TIMEOUT_S:g} s")
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    stopped = "cpu" if code == 128 + signal.SIGXCPU else watch.stopped
    return Result(stdout, stderr, code, stopped, sandbox)


class _Watch:
    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        ready: int,
        limits: Limits,
        ended: threading.Event | None,
    ) -> None:
        assert process.stdout is not None and process.stderr is not None
        self.outputs = bytearray(), bytearray()
        self.started = False
        self.stopped: Limit | None = None
        self._process, self._ready, self._limits = process, ready, limits
        self._is_over = ended.is_set if ended else lambda: False
        self._deadline = time.monotonic() + START_TIMEOUT_S
        self._counted = 0.0
        self._open = {process.stdout.fileno(): self.outputs[0]}
        self._open[process.stderr.fileno()] = self.outputs[1]
        self._selector = selectors.DefaultSelector()
        for fd in (ready, *self._open):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)
        self._ended: int | None = None  # a descriptor that becomes readable when the program ends
        with contextlib.suppress(AttributeError, OSError):  # not on macOS
            self._ended = os.pidfd_open(process.pid)
            self._selector.register(self._ended, selectors.EVENT_READ)

    def follow(self) -> None:
        """Return when the program has ended or has exceeded a limit."""
        while self.stopped is None:
            left = max(0.0, self._deadline - time.monotonic())
            self._read(min(left, POLL_S))
            if self._has_ended():  # also if this process was suspended beyond the deadline
                return
            self.stopped = self._exceeded()

    def end(self) -> None:
        """Kill the program with all its processes and read the output that is left."""
        for pid in _descendants(self._process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads its group
        self._process.wait()
        deadline = time.monotonic() + END_TIMEOUT_S
        # The output ends when the last process has ended.
        while self._open and time.monotonic() < deadline and not self._too_much():
            self._read(POLL_S)
        if self._too_much():
            self.stopped = self.stopped or "output"
        self._cut()
        self._selector.close()
        if self._ended is not None:
            os.close(self._ended)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def _has_ended(self) -> bool:
        """Return whether the process has ended, without giving its ID free for another one."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._process.poll() is not None
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self._process.pid, flags) is not None

    def _read(self, timeout: float) -> None:
        """Wait for output and keep it."""
        for key, _ in self._selector.select(timeout):
            if key.fd == self._ended:
                self._selector.unregister(key.fd)
                continue
            data = os.read(key.fd, 65536)
            if key.fd == self._ready:
                self._selector.unregister(key.fd)
                self.started = data == b"1"
                if self.started:
                    self._deadline = time.monotonic() + self._limits.timeout_s
            elif data:
                self._open[key.fd].extend(data)
            else:
                self._selector.unregister(key.fd)
                del self._open[key.fd]

    def _exceeded(self) -> Limit | None:
        now = time.monotonic()
        if now >= self._deadline or (self.started and self._is_over()):
            return "time"
        if self._too_much():
            return "output"
        if not self.started or now < self._counted + POLL_S:
            return None
        self._counted = now
        pids = [self._process.pid, *_descendants(self._process.pid)]
        if len(pids) > self._limits.processes + 3:  # two of bubblewrap, one that is being replaced
            return "processes"
        return "memory" if exceeds(pids, self._limits.memory_mb * 2**20) else None

    def _too_much(self) -> bool:
        return self._excess() > 0

    def _excess(self) -> int:
        return sum(map(len, self.outputs)) - self._limits.output_kb * 1024

    def _cut(self) -> None:
        longer = max(self.outputs, key=len)
        if (excess := self._excess()) > 0:
            del longer[max(0, len(longer) - excess) :]


def _descendants(pid: int) -> list[int]:
    """Return all descendants of a process (Linux; elsewhere none)."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{parent}/task").glob("*/children"):
                found.extend(map(int, children.read_text().split()))
    return found[1:]
