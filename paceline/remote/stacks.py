"""Python stacks of a run: of the controller and of its workers on this machine, in one file.

A worker writes its stacks to its log when it gets SIGUSR1, even if it is blocked in C code.
"""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.remote.group import Rank, ranks_of
from paceline.remote.parent import is_suspended
from paceline.remote.worker import Worker

REPLY_S = 2.0  # for all workers to write their stacks
POLL_S = 0.05


def write_stacks_on_signal() -> None:
    """Have this process write the stacks of its threads to stderr when it gets SIGUSR1."""
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def write_stacks(path: Path, title: str, workers: Sequence[Worker]) -> None:
    """Append the stacks of this process and of the workers to a file. Takes some seconds at most.

    Workers on threads of this process are part of its stacks; workers on Ray are left out.
    """
    ranks = [rank for worker in workers for rank in ranks_of(worker)]
    asked = [(rank, rank.log_size()) for rank in ranks if isinstance(rank, Rank) and rank.pid]
    for rank, _ in asked:
        with suppress(OSError):  # the process has ended
            os.kill(rank.pid or 0, signal.SIGUSR1)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n\ncontroller:\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        for (rank, _), text in zip(asked, _replies(asked), strict=True):
            file.write(f"\nworker {rank.name!r}, process {rank.pid}:\n{text}")
        file.write("\n")


def _replies(asked: Sequence[tuple[Rank, int]]) -> list[str]:
    """Return what each worker has written since, once it writes no more."""
    texts = [""] * len(asked)
    deadline = time.monotonic() + REPLY_S
    while asked and time.monotonic() < deadline:
        time.sleep(POLL_S)
        before, texts = texts, [rank.log_since(size) for rank, size in asked]
        if all(texts) and texts == before:
            break
    return [
        text or f"no reply{'; it is suspended' if is_suspended(rank.pid or 0) else ''}\n"
        for (rank, _), text in zip(asked, texts, strict=True)
    ]


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
