"""The tie between a worker process and its parent: the worker never outlives it, and the parent
sees whether it is suspended.

Imports only the standard library, because reward processes import this module and must start fast.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, even inside C code (Linux).

    Elsewhere, the closed connection to the parent ends the process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the call above
        os._exit(1)


def is_suspended(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger (Linux; elsewhere False)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
