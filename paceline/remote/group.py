"""A group of ranks: several processes that hold one model and receive every call in the same order.

Rank 0 answers for the group, once all ranks have replied. A rank that dies or fails alone ends the
whole group, because the others may be blocked in a collective operation.
"""

import asyncio
import atexit
import contextlib
import fcntl
import os
import signal
import socket
import struct
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import PacelineError, WorkerDied
from paceline.remote.worker import Build, Worker, mark_seen

SIOCGIFADDR = 0x8915  # Linux: the address of a network interface
LAST_BYTES = 1 << 14  # of a log, to find its last lines
GRACE_S = 5.0  # for the other ranks to reply to a call that failed on one

_address = "127.0.0.1"  # where the other ranks of its group reach this process


class Rank(Worker):
    """A worker in a separate process: it can be killed, and its output is in a log file."""

    def __init__(self, name: str, log_path: Path) -> None:
        super().__init__(name)
        self.pid: int | None = None  # of its process, if that is on this machine
        self._log_path = log_path

    @abstractmethod
    def kill(self) -> None: ...

    def last_lines(self) -> str:
        """Return the last lines of its log, formatted to follow a message."""
        lines = self.log_since(max(0, self.log_size() - LAST_BYTES)).splitlines()[-8:]
        return f"; last lines of {self._log_path}:\n  " + "\n  ".join(lines) if lines else ""

    def log_size(self) -> int:
        """Return the bytes of its log; 0 if there is none."""
        with contextlib.suppress(OSError):
            return self._log_path.stat().st_size
        return 0

    def log_since(self, start: int) -> str:
        """Return its log from this byte on; nothing if it cannot be read (no file descriptor)."""
        with contextlib.suppress(OSError), self._log_path.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")
        return ""

    @property
    def title(self) -> str:
        return f"worker {self.name!r}, process {self.pid}"

    def ask_stacks(self) -> Callable[[], str]:
        """Ask the process for its stacks; return a function that returns what has arrived."""
        size = self.log_size()
        with contextlib.suppress(OSError):  # the process has ended
            if self.pid:
                os.kill(self.pid, signal.SIGUSR1)
        return lambda: self.log_since(size)

    async def peak_memory(self) -> int:
        return await self.call("host", "peak_memory")


class WorkerGroup(Worker):
    """A Worker of several ranks. Parts in `first_only` exist on rank 0 alone."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[Rank],
        first_only: Collection[str] = (),
        clean_up: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name)
        self._pending.clear()
        self._first_only = first_only
        self._clean_up = clean_up
        self.ranks = ranks
        self.node, self.host = ranks[0].node, ranks[0].host
        for rank in ranks:
            rank.died.add_done_callback(self._rank_died)

    def listen(self, part: str, listener: Callable[[Any], None]) -> None:
        self.ranks[0].listen(part, listener)

    def start_call(self, part: str, method: str, *args: Any) -> asyncio.Future[Any]:
        if self.died.done():
            self.died.result()
        if part in self._first_only:
            return self.ranks[0].start_call(part, method, *args)
        replies = [mark_seen(rank.start_call(part, method, *args)) for rank in self.ranks]
        return asyncio.ensure_future(self._combine(f"{part}.{method}", replies))

    async def ready(self) -> None:
        starting = [asyncio.ensure_future(rank.ready()) for rank in self.ranks]
        await asyncio.wait(starting, return_when=asyncio.FIRST_EXCEPTION)
        errors = _errors(starting)
        if errors and not any(isinstance(error, PacelineError) for error in errors):
            # A rank may fail because another one is gone, and reply before it.
            await asyncio.wait(starting, timeout=GRACE_S)
            errors = _errors(starting)
        if errors:
            self._kill()
            await asyncio.gather(*starting, return_exceptions=True)
            raise next((error for error in errors if isinstance(error, PacelineError)), errors[0])

    @property
    def fenced(self) -> int:
        return sum(rank.fenced for rank in self.ranks)

    def waiting_for(self) -> list[str]:
        return [f"{rank.name}: {what}" for rank in self.ranks for what in rank.waiting_for()]

    async def peak_memory(self) -> int:
        return sum(await asyncio.gather(*(rank.peak_memory() for rank in self.ranks)))

    async def close(self) -> None:
        self._closing = True
        await asyncio.gather(*(rank.close() for rank in self.ranks))
        self._clean_up()

    async def _combine(self, what: str, replies: list[asyncio.Future[Any]]) -> Any:
        """Return rank 0's reply or the error of all ranks; an error on some ends the group."""
        _, waiting = await asyncio.wait(replies, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:
            _, waiting = await asyncio.wait(replies, timeout=GRACE_S)
        if self.died.done():
            self.died.result()
        errors = {
            rank: reply.exception()
            for rank, reply in enumerate(replies)
            if reply.done() and reply.exception() is not None
        }
        # That a rank died may be known to its call before it is known to the group.
        if found := next((e for e in errors.values() if isinstance(e, WorkerDied)), None):
            self._fail(found)
            raise found
        if errors and (waiting or len(errors) < len(replies)):
            rank, error = next(iter(errors.items()))
            self._fail(
                WorkerDied(
                    f"{self.ranks[rank].name!r} failed in {what} while other ranks did not: "
                    f"{type(error).__name__}: {error}{self.ranks[rank].last_lines()}"
                )
            )
            self.died.result()
        return replies[0].result()

    def _rank_died(self, died: asyncio.Future[None]) -> None:
        error = None if died.cancelled() else died.exception()
        if isinstance(error, WorkerDied):
            self._fail(error)

    def fence(self, error: WorkerDied) -> None:
        super().fence(error)
        for rank in self.ranks:  # they have the pending calls
            rank.fence(error)

    def _fail(self, error: WorkerDied) -> None:
        if self._closing or self.died.done():
            return
        self.died.set_exception(error)
        self.died.exception()  # mark as retrieved: every waiter gets it anyway
        self._kill()

    def _kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def send(self, message: Any) -> None:
        for rank in self.ranks:
            rank.send(message)


def _errors(replies: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    return [error for each in replies if each.done() and (error := each.exception()) is not None]


def ranks_of(worker: Worker) -> Sequence[Worker]:
    """Return the ranks of a group, or the worker itself."""
    return worker.ranks if isinstance(worker, WorkerGroup) else [worker]


def start_rank(
    rank: int, count: int, store: str, build: Build, args: tuple[Any, ...]
) -> Mapping[str, Any]:
    """Join the other ranks at `store` and build the parts. Runs in the rank's process.

    `store` is a file:// of this machine or tcp://host:port.
    """
    global _address
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    url = urlsplit(store)
    if url.scheme == "file":
        use_interface("127.0.0.1")
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=count)
    else:
        assert url.hostname and url.port
        use_interface(url.hostname)
        _address = _own_address(url.hostname)
        listening = (
            int(url.query.removeprefix("fd=")) if url.query else None
        )  # the socket of rank 0
        tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
        meeting = tcp_store(
            url.hostname, url.port, count, listening is not None, master_listen_fd=listening
        )
        dist.init_process_group(backend, store=meeting, rank=rank, world_size=count)
    atexit.register(_leave_group)
    return build(*args)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():  # a library may have left it already
        dist.destroy_process_group()


def use_interface(host: str) -> None:
    """Have gloo use the network interface that leads to `host`.

    By default gloo resolves the machine's host name, which may fail.
    """
    if sys.platform != "linux":
        return
    address = _own_address(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # an interface without an address
                if (
                    socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
                    == address
                ):
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def address_in_group() -> str:
    """Return the address where the other ranks of its group reach this process."""
    return _address


def _own_address(host: str) -> str:
    """Return the address of this machine in the network that leads to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return str(probe.getsockname()[0])


def is_first_rank() -> bool:
    """Return whether this process is rank 0 of its group, or not in a group."""
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
