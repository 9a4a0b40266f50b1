"""Workers on this machine: each pool is a process with its own cores, or a thread when there is only one pool.

A process that dies is reported with the last lines of its log.
"""

import asyncio
import contextlib
import logging
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.remote.group import IN_RANKS, Rank, WorkerGroup, start_rank
from paceline.remote.host import ThreadChannel, serve
from paceline.remote.message import Call, Reply
from paceline.remote.worker import Build, Worker
from paceline.types import Role
from paceline.workers.build import build_parts
from paceline.workers.cluster import Node, PlannedWorker

log = logging.getLogger(__name__)


SWITCH_S = 2e-4  # a worker's thread asks for Python's lock between any two operations; it must not wait for the controller's whole turn


class ThreadWorker(Worker):
    """A worker on a thread of this process: the hybrid engine, where generation and training share memory.

    Roles in `beside` have a thread of their own, to work while the others do."""

    def __init__(
        self, name: str, build: Build, args: tuple[Any, ...], beside: Collection[str] = ()
    ) -> None:
        super().__init__(name)
        self._channel, self._second = ThreadChannel(), ThreadChannel()
        self._second.outbox = self._channel.outbox
        self._beside = frozenset(beside)
        sys.setswitchinterval(SWITCH_S)
        self._host = threading.Thread(target=self._run, args=(build, args), name=name, daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self._host.start()
        self._reader.start()

    def _run(self, build: Build, args: tuple[Any, ...]) -> None:
        try:
            try:
                parts = build(*args)
            except Exception as error:
                self._channel.send(Reply(0, error=error))
                return
            first = {role: part for role, part in parts.items() if role not in self._beside}
            second = {role: part for role, part in parts.items() if role in self._beside}
            thread = threading.Thread(
                target=self._serve_second, args=(second,), name=f"{self.name}-second", daemon=True
            )
            if second:
                thread.start()
            self._channel.send(Reply(0))
            serve(self._channel, first)
            if second:
                thread.join()
            self._channel.send(None)
        except BaseException as error:
            log.exception("worker %s failed", self.name)
            self._channel.send(error)

    def _serve_second(self, parts: Mapping[str, Any]) -> None:
        try:
            serve(self._second, parts)
        except BaseException as error:
            log.exception("worker %s failed", self.name)
            self._channel.send(error)

    def _read(self) -> None:
        while (message := self._channel.outbox.get()) is not None:
            target = self._dead if isinstance(message, BaseException) else self._receive
            try:
                self._loop.call_soon_threadsafe(target, message)
            except RuntimeError:
                return  # the event loop is closed; nobody listens any more
            if isinstance(message, BaseException):
                return

    def _send(self, message: Any) -> None:
        if message is None:
            self._second.inbox.put(None)
        second = isinstance(message, Call) and message.role in self._beside
        (self._second if second else self._channel).inbox.put(message)

    async def close(self) -> None:
        self._closing = True
        self._send(None)
        await asyncio.to_thread(self._host.join, 10)
        self._channel.outbox.put(None)


class ProcessWorker(Rank):
    """A worker in a process of its own, pinned to its cores."""

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
        theirs.close()
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self.process.pid, cores)
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"{name}-writer", daemon=True)
        self._reader.start()
        self._writer.start()
        self._send((build, args))

    def _write(self) -> None:
        """On a thread of its own: a process that has been stopped takes nothing more, and the controller must not wait for it."""
        with contextlib.suppress(OSError):  # the reader sees its end too
            while (message := self._outbox.get()) is not None:
                self._connection.send_bytes(message)

    def _read(self) -> None:
        cause: Exception | None = None
        try:
            while True:
                self._loop.call_soon_threadsafe(self._receive, self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception as error:  # what it says cannot be read, or nobody listens any more
            cause = error
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._dead, cause)

    def kill(self) -> None:
        self.process.kill()

    def _send(self, message: Any) -> None:
        self._outbox.put(ForkingPickler.dumps(message))

    def _last_words(self) -> str:
        code = self.process.returncode
        how = (
            f" (killed by signal {-code})"
            if code is not None and code < 0
            else f" (exit code {code})"
        )
        return how + self.last_lines()

    async def close(self) -> None:
        self._closing = True
        self._send(None)
        if self.starting:
            self.process.kill()  # it reads nothing before it stands, and has nothing to lose
        try:
            await asyncio.to_thread(self.process.wait, 5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        self._outbox.put(None)
        await asyncio.to_thread(self._reader.join, 5)
        await asyncio.to_thread(self._writer.join, 5)
        self._connection.close()


class LocalCluster:
    """This machine."""

    def __init__(self, config: RunConfig, model_path: str, log_folder: Path) -> None:
        self._config, self._model_path, self._logs = config, model_path, log_folder
        self._gpus: dict[str, list[int]] = {}  # by worker
        log_folder.mkdir(parents=True, exist_ok=True)

    def nodes(self) -> list[Node]:
        return [this_machine()]

    async def reserve(self, plans: Sequence[PlannedWorker]) -> None:
        """Nobody else is asked: what this machine has is ours."""

    async def start(self, plan: PlannedWorker) -> Worker:
        args = (plan.roles, self._config, self._model_path, plan.threads)
        if plan.ranks:
            return process_group(
                plan.name,
                build_parts,
                args,
                ranks=plan.ranks,
                threads=plan.threads,
                log_folder=self._logs,
                cores=plan.cores,
                gpus=self.gpus(plan),
                first_only=set(plan.roles) - IN_RANKS,
            )
        if plan.alone:
            return ThreadWorker(
                plan.name,
                build_parts,
                args,
                {Role.ROLLOUT} if self._config.placement.overlap else (),
            )
        return ProcessWorker(
            plan.name,
            build_parts,
            args,
            cores=list(plan.cores),
            threads=plan.threads,
            log_path=self._logs / f"{plan.name}.log",
            gpu=next(iter(self.gpus(plan)), None),
        )

    def gpus(self, plan: PlannedWorker) -> list[int]:
        """Which GPUs its ranks use, where devices are GPUs: those it was planned for, or (it has joined later) the least used one."""
        if count := _count_gpus()[0]:
            used = Counter(
                index for name, taken in self._gpus.items() if name != plan.name for index in taken
            )
            self._gpus[plan.name] = [device.index for device in plan.devices] or [
                min(range(count), key=lambda index: used[index])
            ]
        return self._gpus.get(plan.name, [])

    async def close(self) -> None:
        """Workers are closed by whoever started them; a machine stays."""


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
    """A group whose ranks are processes of this machine; they find each other through a file."""
    folder = tempfile.mkdtemp(prefix="paceline-group-")
    store = f"file://{folder}/store"
    workers = [
        ProcessWorker(
            f"{name} rank {rank}",
            start_rank,
            (rank, ranks, store, build, args),
            cores=list(cores[rank * threads : (rank + 1) * threads]),
            threads=threads,
            log_path=log_folder / f"{name}.{rank}.log",
            gpu=gpus[rank] if gpus else None,
        )
        for rank in range(ranks)
    ]
    return WorkerGroup(name, workers, first_only, lambda: shutil.rmtree(folder, ignore_errors=True))


def this_machine() -> Node:
    cores = available_cores()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus, gpu_memory = _count_gpus()
    return Node("local", len(cores), gpus, memory, gpu_memory, tuple(cores))


def available_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _count_gpus() -> tuple[int, int]:
    """How many there are, and the memory of the smallest."""
    import torch

    count = torch.cuda.device_count()
    return count, min(
        (torch.cuda.get_device_properties(index).total_memory for index in range(count)), default=0
    )


def visible_gpu(index: int) -> str:
    """The name of our n-th GPU, which may itself be one of a choice."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ours.split(",")[index] if ours else str(index)
