"""Check for processes that a test has left behind, and for what processes listen on."""

from collections.abc import Iterable

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


def listening(pids: Iterable[int]) -> set[str]:
    """Return the addresses on which processes accept connections."""
    return {
        connection.laddr.ip
        for pid in pids
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
