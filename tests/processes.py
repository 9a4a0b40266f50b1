"""Processes of a run: its workers, those that a test has left behind, and their addresses."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil

from paceline.remote.process import ProcessWorker
from paceline.remote.worker import Build

SHARED: set[int] = set()  # PIDs of processes that several modules use


def children() -> set[int]:
    """Return the PIDs of running child processes, without shared ones and without the resource
    tracker of multiprocessing, which runs until its parent exits."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            tracker = "resource_tracker" in " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and not tracker:
                found.add(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found - SHARED


@asynccontextmanager
async def started(
    build: Build, log_path: Path, *args: Any, name: str = "worker"
) -> AsyncIterator[ProcessWorker]:
    """Start a worker process, use it for at most two minutes, and close it."""
    worker = ProcessWorker(name, build, args, cores=[], threads=1, log_path=log_path)
    try:
        async with asyncio.timeout(120):
            await worker.ready()
            yield worker
    finally:
        await worker.close()


def worker_pids(run_dir: Path) -> dict[str, int]:
    """Return the process ID of each worker; of two with the same name, the younger.

    Each worker writes to a separate log file, so its open file identifies it.
    """
    logs = (run_dir / "logs").resolve()
    found: dict[str, int] = {}
    for process in sorted(psutil.Process().children(), key=lambda process: process.create_time()):
        log = Path(os.path.realpath(f"/proc/{process.pid}/fd/1"))
        if log.parent == logs:
            found[log.stem] = process.pid
    return found


@contextmanager
def nohup() -> Iterator[None]:
    """Let processes that are started here ignore SIGHUP, as the command nohup does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def ignores(number: signal.Signals, status: str) -> bool:
    """Return whether the process with this text of /proc/*/status ignores a signal."""
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> number - 1 & 1)


def listening(pids: Iterable[int]) -> set[str]:
    """Return the addresses on which processes accept connections."""
    return {
        connection.laddr.ip
        for pid in pids
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
