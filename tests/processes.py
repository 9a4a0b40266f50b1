"""Processes of a run: its workers, those that a test has left behind, and their addresses."""

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

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


def listening(pids: Iterable[int]) -> set[str]:
    """Return the addresses on which processes accept connections."""
    return {
        connection.laddr.ip
        for pid in pids
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
