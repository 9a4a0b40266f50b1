"""Locks on the files of a run directory, so that two runs never write into one.

A lock belongs to an open file. Processes that the program forks inherit the file; they give it up,
so that a child that outlives the run does not keep the directory locked.
"""

import fcntl
import os
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

from paceline.errors import CheckpointError

_HELD: "WeakSet[IO[Any]]" = WeakSet()


def acquire(file: IO[Any], run_dir: Path) -> None:
    """Lock an open file of a run directory, or raise CheckpointError if another run has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CheckpointError(
            f"run_dir = {run_dir} is in use by another run; wait for it, end it (in Python with "
            "the method stop() of paceline.steps), or use another run_dir. Do not delete its files"
        ) from None
    _HELD.add(file)


def release(file: IO[Any]) -> None:
    """Unlock a file and close it. Closing alone leaves the lock to a process that inherited it."""
    if not file.closed:
        fcntl.flock(file, fcntl.LOCK_UN)
        file.close()


def is_in_place(file: IO[Any], path: Path) -> bool:
    """Return whether the path still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _forget_in_child() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in _HELD:
        if not file.closed:
            os.dup2(nothing, file.fileno())  # what the child flushes must not be written either
    os.close(nothing)


os.register_at_fork(after_in_child=_forget_in_child)
