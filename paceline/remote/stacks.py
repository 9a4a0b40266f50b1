"""Python stacks of a run in one file: of the controller, its workers and its reward processes.

A process of this machine writes its stacks to a file when it gets SIGUSR1, even if it is blocked in
C code. A worker on Ray is asked by a call of its actor, which one of its other threads serves.
"""

import faulthandler
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from paceline.printable import printable
from paceline.remote.group import Rank, ranks_of
from paceline.remote.parent import is_suspended
from paceline.remote.worker import Worker

REPLY_S = 2.0  # for all processes to write their stacks
POLL_S = 0.05


class Traced(Protocol):
    """A process that writes its stacks when it is asked."""

    @property
    def title(self) -> str: ...
    @property
    def pid(self) -> int | None: ...  # if it is on this machine
    def ask_stacks(self) -> Callable[[], str]:
        """Ask for the stacks; return a function that returns what has arrived."""
        ...


def write_stacks_on_signal() -> None:
    """Have this process write the stacks of its threads to stderr when it gets SIGUSR1."""
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def current_stacks() -> str:
    """Return the stacks of the threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        return read_from(file, 0)


def read_from(file: IO[bytes], start: int) -> str:
    """Return what a file has from this byte on; nothing if it was closed meanwhile."""
    with suppress(OSError, ValueError):
        size = os.fstat(file.fileno()).st_size
        return os.pread(file.fileno(), max(0, size - start), start).decode(errors="replace")
    return ""


def write_stacks(
    path: Path, title: str, workers: Sequence[Worker], others: Sequence[Traced] = ()
) -> None:
    """Append the stacks of this process and of the others to a file. Takes some seconds at most.

    Workers on threads of this process are part of its stacks.
    """
    ranks = [rank for worker in workers for rank in ranks_of(worker) if isinstance(rank, Rank)]
    asked: list[Traced] = [*ranks, *others]
    replies = [process.ask_stacks() for process in asked]
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n\ncontroller:\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        for process, text in zip(asked, _texts(replies), strict=True):
            suspended = "; it is suspended" if is_suspended(process.pid or 0) else ""
            file.write(f"\n{process.title}:\n{printable(text) or f'no reply{suspended}'}\n")


def _texts(replies: Sequence[Callable[[], str]]) -> list[str]:
    """Return what each process has written, once it writes no more."""
    texts = [""] * len(replies)
    deadline = time.monotonic() + REPLY_S
    while replies and time.monotonic() < deadline:
        time.sleep(POLL_S)
        before, texts = texts, [reply() for reply in replies]
        if all(texts) and texts == before:
            break
    return texts


def unanswered(worker: Worker) -> list[str]:
    """Describe the calls that a worker has not answered, and whether it is suspended."""
    calls = worker.waiting_for()
    stopped = [
        rank.pid
        for rank in ranks_of(worker)
        if isinstance(rank, Rank) and rank.pid and is_suspended(rank.pid)
    ]
    why = f"; its process {stopped[0]} is suspended" if stopped else ""
    return [f"worker {worker.name!r} has not finished {', '.join(calls)}{why}"] if calls else []
