"""Workers in processes of this machine: one process, or a group of ranks.

A process that dies is reported with the last lines of its log.
"""

import asyncio
import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from paceline.remote.group import Rank, WorkerGroup, start_rank
from paceline.remote.worker import Build
from paceline.temporary import TemporaryFolder

# What a signal says about its cause, and what to try.
CAUSES = {
    signal.SIGILL: "the CPU rejected an instruction; if train.dtype = 'bfloat16', use float32, or "
    "set the environment variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16",
    signal.SIGFPE: "an arithmetic error in native code; try train.dtype=float32",
    signal.SIGSEGV: "a crash in native code, of torch or another library",
}


class ProcessWorker(Rank):
    """A worker in a separate process, pinned to its cores."""

    def __init__(
        self,
        name: str,
        build: Build,
        args: tuple[Any, ...],
        *,
        cores: list[int],
        threads: int,
        log_path: Path,
        gpu: int | None = None,
    ) -> None:
        super().__init__(name, log_path)
        ours, theirs = socket.socketpair()
        env = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible_gpu(gpu)
        with log_path.open("ab") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "paceline.remote.host",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.pid = self.process.pid
        theirs.close()
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self.process.pid, cores)
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"{name}-writer", daemon=True)
        self._reader.start()
        self._writer.start()
        self.send((build, args))

    def _write(self) -> None:
        # On a thread, because a suspended process reads nothing and the controller must not block.
        with contextlib.suppress(OSError):  # the reader notices the end too
            while (message := self._outbox.get()) is not None:
                self._connection.send_bytes(message)

    def _read(self) -> None:
        cause: Exception | None = None
        try:
            while True:
                self._loop.call_soon_threadsafe(self._receive, self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception as error:  # a message cannot be unpickled, or the loop is closed
            cause = error
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._dead, cause)

    def kill(self) -> None:
        self.process.kill()

    def send(self, message: Any) -> None:
        self._outbox.put(ForkingPickler.dumps(message))

    def _exit_details(self) -> str:
        return f" ({describe_exit(self.process.returncode)}){self.last_lines()}"

    async def close(self) -> None:
        self._closing = True
        self.send(None)
        if self.starting:
            self.process.kill()  # it reads nothing while it starts, and has no state to lose
        try:
            await asyncio.to_thread(self.process.wait, 5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        self._outbox.put(None)
        await asyncio.to_thread(self._reader.join, 5)
        await asyncio.to_thread(self._writer.join, 5)
        self._connection.close()


def process_group(
    name: str,
    build: Build,
    args: tuple[Any, ...],
    *,
    ranks: int,
    threads: int,
    log_folder: Path,
    cores: Sequence[int] = (),
    gpus: Sequence[int] = (),
    first_only: Collection[str] = (),
) -> WorkerGroup:
    """Start a group whose ranks are processes of this machine; they meet through a file."""
    folder = TemporaryFolder("paceline-group-")
    store = f"file://{folder.path}/store"
    workers: list[ProcessWorker] = []
    try:
        for rank in range(ranks):
            worker = ProcessWorker(
                f"{name} rank {rank}",
                start_rank,
                (rank, ranks, store, build, args),
                cores=list(cores[rank * threads : (rank + 1) * threads]),
                threads=threads,
                log_path=log_folder / f"{name}.{rank}.log",
                gpu=gpus[rank] if gpus else None,
            )
            workers.append(worker)
    except BaseException:  # the others would wait for this rank
        for worker in workers:
            worker.kill()
        folder.close()
        raise
    return WorkerGroup(name, workers, first_only, folder.close)


def describe_exit(code: int | None) -> str:
    """Return how a process ended, and what that means if it was a signal."""
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code)
    except ValueError:  # a real-time signal
        return f"killed by signal {-code}"
    cause = f": {CAUSES[name]}" if name in CAUSES else ""
    return f"killed by signal {-code}, {name.name}{cause}"


def visible_gpu(index: int) -> str:
    """Return the CUDA name of the n-th GPU that this process may use."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ours.split(",")[index] if ours else str(index)
