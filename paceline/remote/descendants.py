"""Processes that user code has started, and their end.

They carry a mark in their environment, so they are found even if they started a new session and
their parents have exited (Linux; elsewhere killing the process group must do). Imports only the
standard library, because processes of user code import this module and must start fast.
"""

import os
import re
import secrets
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import suppress

VARIABLE = "PACELINE_USER_PROCESS"
PATTERN = re.compile(rb"(?:^|\0)" + VARIABLE.encode() + rb"=([0-9a-f]+)")
LIMIT_S = 10.0  # for processes that start others as fast as they are killed
# Scans in a row that find nothing, before and after one that did: a process that forks and exits
# can be missed by a scan.
EMPTY_SCANS, EMPTY_SCANS_AFTER = 3, 10


def new_mark() -> str:
    return secrets.token_hex(16)


def kill_descendants(roots: Collection[int], marks: Collection[str]) -> None:
    """Kill all descendants of the processes `roots` and all marked processes, but no root.

    They are stopped before they are killed: two processes may watch and restart each other, and one
    may fork and exit again and again.
    """
    wanted, deadline = {mark.encode() for mark in marks if mark}, time.monotonic() + LIMIT_S
    stopped: set[int] = set()
    empty, enough = 0, EMPTY_SCANS
    while empty < enough and time.monotonic() < deadline:
        found = set(_signal_all(roots, wanted, signal.SIGSTOP))
        empty, enough = (0, EMPTY_SCANS_AFTER) if found else (empty + 1, enough)
        if found <= stopped or time.monotonic() > deadline:  # nothing has started since
            for pid in found:
                _send(pid, signal.SIGKILL)
            stopped.clear()
        else:
            stopped = found


def _signal_all(
    roots: Collection[int], marks: Collection[bytes], number: signal.Signals
) -> Iterator[int]:
    """Signal each process as soon as it is found, the newest first: it may exit very soon."""
    with suppress(OSError):  # there is no /proc, or there are too many open files
        for pid in sorted((int(n) for n in os.listdir("/proc") if n.isdigit()), reverse=True):
            if pid not in roots and (_mark(pid) in marks or _descends(pid, roots)):
                state, _ = _stat(pid)
                if state and state not in "ZX" and _send(pid, number):
                    yield pid


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except OSError:  # it has ended, or belongs to another user
        return False
    return True


def _mark(pid: int) -> bytes | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            found = PATTERN.search(file.read())
    except OSError:
        return None
    return found[1] if found else None


def _descends(pid: int, roots: Collection[int]) -> bool:
    while pid > 1:
        _, pid = _stat(pid)
        if pid in roots:
            return True
    return False


def _stat(pid: int) -> tuple[str, int]:
    """Return the state of a process and the ID of its parent; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except (OSError, ValueError):
        return "", 0
    return state.decode(), int(parent)
