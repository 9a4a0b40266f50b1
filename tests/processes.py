"""Check for processes that a test has left behind, and for what processes listen on."""

from collections.abc import Iterable

import psutil


def children() -> set[int]:
    """Return the PIDs of running child processes, without the resource tracker of multiprocessing,
    which runs until its parent exits."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            tracker = "resource_tracker" in " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and not tracker:
                found.add(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def listening(pids: Iterable[int]) -> set[str]:
    """Return the addresses on which processes accept connections."""
    return {
        connection.laddr.ip
        for pid in pids
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
