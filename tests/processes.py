"""Which processes a test has left behind."""

import psutil


def children() -> set[int]:
    """Living child processes, without the tracker that multiprocessing keeps until its parent ends."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(
                process.cmdline()
            ):
                found.add(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found
