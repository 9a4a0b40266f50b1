"""Faults that are injected into a run from outside, and the proof that each one fired.

A victim is chosen by its role. Local workers are found by the log file they write to, workers on
Ray by the process ID in that file.
"""

import ctypes
import itertools
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

LIBC = ctypes.CDLL(None)
PIDFD_GETFD = 438  # system call
ENDED_S = 10.0  # for a killed process to disappear
STARVED_S = 20.0  # for a process to need memory that it does not get
CUT_S = 20.0  # for the next weight sync
NEXT, POLLS = 3, 500  # descriptors that a transfer may get; how often they are looked at in turn
MEMORY_LIMIT = 64 << 20  # below what every victim uses: it gets no more
ROLES = ("controller", "train", "rollout", "reward")


class Victims:
    """The processes of a supervised run, by role."""

    def __init__(
        self, supervisor: int, run_dir: Path, nodes: Callable[[], list[int]] | None = None
    ) -> None:
        """`nodes` returns the processes that may be killed as a node."""
        self._supervisor, self._logs = supervisor, (run_dir / "logs").resolve()
        self._nodes = nodes or list

    def find(self, role: str) -> list[int]:
        """Return the process IDs that have a role now, in a stable order."""
        if role == "node":
            return self._nodes()
        with suppress(psutil.Error):
            controllers = psutil.Process(self._supervisor).children()
            if role == "controller":
                return [process.pid for process in controllers]
            below = [child for one in controllers for child in one.children(recursive=True)]
            if role == "reward":
                return sorted(process.pid for process in below if _runs(process, "reward.worker"))
            local = sorted(process.pid for process in below if self._writes(process.pid, role))
            return local or sorted(self._on_ray(role))
        return []

    def all(self) -> list[int]:
        """Return all processes of the run, without the supervisor."""
        with suppress(psutil.Error):
            found = psutil.Process(self._supervisor).children(recursive=True)
            return [process.pid for process in found]
        return []

    def _writes(self, pid: int, role: str) -> bool:
        output = Path(os.path.realpath(f"/proc/{pid}/fd/1"))
        return output.parent == self._logs and output.name.startswith(role)

    def _on_ray(self, role: str) -> Iterator[int]:
        for path in self._logs.glob(f"{role}*.log"):
            for pid in re.findall(r"^process (\d+) on ", path.read_text(errors="replace"), re.M):
                with suppress(psutil.Error):
                    if _runs(psutil.Process(int(pid)), "ray::RayHost"):
                        yield int(pid)


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    role: str  # of the victim; "all": every process of the run
    seconds: float = 0.0  # of a suspension

    def __str__(self) -> str:
        length = f" for {self.seconds:g} s" if self.seconds else ""
        return f"{self.kind} {self.role}{length}"

    def inject(self, victims: Victims, pid: int) -> str:
        """Inject the fault; return the proof that it fired, or "" if it did not."""
        if self.kind == "kill":
            os.kill(pid, signal.SIGKILL)
            return _ended(pid)
        if self.kind == "suspend":
            return _suspend(victims.all() if self.role == "all" else [pid], self.seconds)
        if self.kind == "starve":
            return _starve(pid)
        assert self.kind == "cut", self.kind
        return _cut(pid, [*victims.find("train"), *victims.find("rollout")])


# Suspensions are shorter and longer than the deadlines of the run (soak.py).
FAULTS = (
    *(Fault("kill", role) for role in ROLES),
    *(Fault("suspend", role, 3.0) for role in ROLES),
    *(Fault("suspend", role, 9.0) for role in ("rollout", "reward")),
    *(Fault("starve", role) for role in ("train", "rollout")),
    Fault("cut", "rollout"),
)
LOCAL = (*FAULTS, Fault("suspend", "all", 9.0))


def _runs(process: psutil.Process, what: str) -> bool:
    return what in " ".join(process.cmdline())


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _ended(pid: int, seconds: float = ENDED_S) -> str:
    return f"process {pid} ended" if _until(lambda: _has_ended(pid), seconds) else ""


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _suspend(pids: list[int], seconds: float) -> str:
    seen = 0
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        for pid in pids:
            # A run replaces a worker that is suspended for long, so it may have ended.
            with suppress(psutil.Error):
                seen += psutil.Process(pid).status() in (
                    psutil.STATUS_STOPPED,
                    psutil.STATUS_ZOMBIE,
                )
            seen += not psutil.pid_exists(pid)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    return f"{seen} of {len(pids)} processes were stopped" if pids and seen == len(pids) else ""


def _starve(pid: int) -> str:
    """Let every new allocation of a process fail, until it ends."""
    process = psutil.Process(pid)
    before = process.rlimit(resource.RLIMIT_AS)
    process.rlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, before[1]))
    try:
        return _ended(pid, STARVED_S)
    finally:
        with suppress(psutil.Error):
            process.rlimit(resource.RLIMIT_AS, before)


def _cut(pid: int, sources: list[int]) -> str:
    """Shut down the connection over which an engine receives weights, while it is open."""
    ports = {
        connection.laddr.port
        for source in sources
        for connection in psutil.Process(source).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    # A transfer takes milliseconds. Its socket gets one of the first free descriptors.
    used = set(map(int, os.listdir(f"/proc/{pid}/fd")))
    for _ in range(10):  # without those that are open for a moment
        time.sleep(0.05)
        used &= set(map(int, os.listdir(f"/proc/{pid}/fd")))
    free = list(itertools.islice((n for n in itertools.count() if n not in used), NEXT))
    deadline = time.monotonic() + CUT_S
    with _handle(pid) as handle:
        while time.monotonic() < deadline and not _has_ended(pid):
            for descriptor in free * POLLS:
                if peer := _shut_down(handle, descriptor, ports):
                    return f"connection to {peer[0]}:{peer[1]} shut down"
                time.sleep(1e-4)
    return ""


def _shut_down(handle: int, descriptor: int, ports: set[int]) -> tuple[str, int] | None:
    copy = LIBC.syscall(PIDFD_GETFD, handle, descriptor, 0)
    if copy < 0:
        return None
    with socket.socket(fileno=copy) as connection, suppress(OSError):
        if connection.family == socket.AF_INET:
            host, port = connection.getpeername()[:2]
            if port in ports:
                connection.shutdown(socket.SHUT_RDWR)
                return host, port
    return None


@contextmanager
def _handle(pid: int) -> Iterator[int]:
    handle = os.pidfd_open(pid)
    try:
        yield handle
    finally:
        os.close(handle)
