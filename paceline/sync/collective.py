"""Weight transfer by broadcast, in a process group made for it: NCCL between GPUs, gloo between
CPUs.

The trainer broadcasts chunks while it gathers the rest. An engine that has just started, was late
or has recovered is not in the group: it fetches the version over TCP as from a stream, and joins
the next group. If a broadcast fails, each member continues over TCP from the byte it has reached.
No component waits for an engine longer than one timeout.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from paceline.errors import SyncError, WorkerDied
from paceline.remote.group import use_interface
from paceline.remote.listener import Address
from paceline.remote.message import Deferred
from paceline.remote.worker import Worker, mark_seen
from paceline.sync.block import CHUNK, Layout, Tensors
from paceline.sync.meeting import Meeting, meet
from paceline.sync.stream import Stream, StreamSource, StreamTarget, WeightBuffer
from paceline.sync.transport import SOURCE, TARGET, publish
from paceline.sync.weights import Weights

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0  # of one chunk
MEET_TIMEOUT_S = 30.0  # of forming a group
AHEAD = 3  # chunks that are broadcast at the same time


class BroadcastGroup:
    """The trainer (rank 0) and some engines, separate from any other process group of theirs."""

    def __init__(self, store: Address, token: bytes, epoch: int, rank: int, size: int) -> None:
        dist: Any = torch.distributed
        use_interface(store[0])
        self._meeting = meet(store, token, MEET_TIMEOUT_S)  # the group does not keep it alive
        prefix = dist.PrefixStore(f"broadcast group {epoch}", self._meeting)
        timeout = timedelta(seconds=TIMEOUT_S)
        if torch.cuda.is_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = dist.ProcessGroupNCCL(prefix, rank, size, options)
            self._bucket: torch.Tensor | None = torch.empty(CHUNK, dtype=torch.uint8, device="cuda")
            self._stream = torch.cuda.Stream()
        else:
            self._group = dist.ProcessGroupGloo(prefix, rank, size, timeout)
            self._bucket = None
        self._first = dist.BroadcastOptions()
        self._first.rootRank = 0

    def start(self, chunk: torch.Tensor, send: bool) -> Callable[[], object]:
        """Start to broadcast the trainer's chunk and return a function that waits for its arrival.

        Chunks in flight must be the same, in the same order, on all members.
        """
        if self._bucket is None:
            return self._group.broadcast([chunk], self._first).wait
        with torch.cuda.stream(self._stream):  # concurrent with what this GPU computes
            bucket = self._bucket[: len(chunk)]
            if send:
                bucket.copy_(chunk, non_blocking=True)
            self._group.broadcast([bucket], self._first).wait()
            if not send:
                chunk.copy_(bucket, non_blocking=True)
        return self._stream.synchronize


class PendingBroadcasts:
    """Chunks in flight, oldest first: later ones travel while one is filled or summed."""

    def __init__(self, group: BroadcastGroup, send: bool) -> None:
        self._group, self._send = group, send
        self._pending: deque[Callable[[], object]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, chunk: torch.Tensor) -> None:
        self._pending.append(self._group.start(chunk, self._send))

    def finish_one(self) -> None:
        self._pending.popleft()()

    def finish(self) -> None:
        while self._pending:
            self.finish_one()

    def abandon(self) -> None:
        """Wait until no chunk is read or written any more; if one fails, all fail."""
        while self._pending:
            with contextlib.suppress(RuntimeError):
                self.finish_one()


class CollectiveSource(StreamSource):
    def __init__(self, layout: Layout, host: str, token: bytes) -> None:
        super().__init__(layout, host, token)
        self._token, self._meeting = token, Meeting(host, token)
        self._broadcast_group: BroadcastGroup | None = None
        self._sender = threading.Thread()

    def store_address(self) -> Address:
        """Return where the members of a group meet."""
        return self._meeting.address

    def join(self, epoch: int, size: int) -> None:
        self._set_group(None)
        if size > 1:
            address = self._meeting.address
            self._set_group(BroadcastGroup(address, self._token, epoch, 0, size))

    def _set_group(self, group: BroadcastGroup | None) -> None:
        with self._changed:
            self._broadcast_group = group

    def write(self, tensors: Tensors, version: int) -> int:
        if self._sender.is_alive():
            self._sender.join()
        if self._broadcast_group is None:
            return super().write(tensors, version)
        self._new_buffer()
        self._buffer.readers += 1
        args = self._broadcast_group, self._buffer, version
        self._sender = threading.Thread(target=self._send, args=args, name="weights", daemon=True)
        self._sender.start()
        return self._fill(tensors, version)

    def _send(self, group: BroadcastGroup, buffer: WeightBuffer, version: int) -> None:
        sent, pending = 0, PendingBroadcasts(group, send=True)
        try:
            while sent < buffer.size and (filled := buffer.wait(version, sent)):
                while sent < filled:
                    end = min(filled, sent + CHUNK)
                    if len(pending) == AHEAD:
                        pending.finish_one()
                    pending.start(buffer.block.bytes[sent:end])
                    sent = end
            pending.finish()
        except RuntimeError as error:
            pending.abandon()
            with self._changed:
                if self._broadcast_group is group:  # a newer one may have been formed meanwhile
                    self._broadcast_group = None
            log.warning(
                "the broadcast of version %d failed; engines fetch the rest over TCP: %s",
                version,
                error,
            )
        finally:
            with self._changed:
                buffer.readers -= 1
                self._changed.notify_all()


class CollectiveTarget(StreamTarget):
    def __init__(self, layout: Layout, host: str, token: bytes) -> None:
        super().__init__(layout, host, token, "cuda" if torch.cuda.is_available() else "cpu")
        self._broadcast_group: BroadcastGroup | None = None
        self._joined: BroadcastGroup | None = None  # the last group, also while it is in use

    def join(self, store: Address, epoch: int, rank: int, size: int) -> None:
        self._set_group(None)
        self._set_group(BroadcastGroup(store, self._token, epoch, rank, size))

    def _set_group(self, group: BroadcastGroup | None) -> None:
        with self._changed:
            self._broadcast_group = self._joined = group

    def receive(self, version: int) -> Deferred:
        """Take part in a broadcast and return whether all of it arrived that way."""
        # Restored when the whole version has arrived.
        group, self._broadcast_group = self._broadcast_group, None
        self._start(version, group)
        return Deferred(lambda: self.done(version), self.in_broadcast_group)

    def in_broadcast_group(self) -> bool:
        return self._broadcast_group is not None

    def _fetch(
        self, buffer: WeightBuffer, version: int, group: BroadcastGroup | None = None
    ) -> None:
        if group is not None:
            pending = PendingBroadcasts(group, send=False)
            try:
                self._receive(buffer, pending)
                with self._changed:
                    if self._joined is group:  # a late thread must not replace a newer one
                        self._broadcast_group = group
                return
            except RuntimeError as error:
                pending.abandon()
                log.warning(
                    "the broadcast of version %d failed; fetching the rest over TCP: %s",
                    version,
                    error,
                )
        super()._fetch(buffer, version)

    def _receive(self, buffer: WeightBuffer, pending: PendingBroadcasts) -> None:
        expected = buffer.filled
        while not buffer.done:
            while expected < buffer.size and len(pending) < AHEAD:
                end = min(buffer.size, expected + CHUNK)
                pending.start(buffer.block.bytes[expected:end])
                expected = end
            pending.finish_one()
            buffer.advance()


class Collective(Stream):
    ENDS = (CollectiveSource, CollectiveTarget)

    def __init__(self, trainer: Worker, layout: Layout, token: bytes, source: Address) -> None:
        super().__init__(trainer, layout, token, source)
        # Members, and whether they received all of the last version by broadcast.
        self._members: dict[Worker, asyncio.Future[bool]] = {}
        self._epoch = 0
        self._new = False  # the group has not broadcast a whole version yet
        self._failed: set[Worker] = set()

    async def publish(self, version: int) -> Weights:
        living = list(self._living())
        able = [e for e in living if e not in self._members or _succeeded(self._members[e])]
        intact = all(_succeeded(reply) and reply.result() for reply in self._members.values())
        if self._new and not intact:
            self._failed = set(self._members)  # not even their first broadcast succeeded
        self._new = self._new and not intact
        if set(able) == self._failed:
            self._members = {}  # they fetch until the set of engines changes
        elif able != list(self._members) or not intact:
            await self._form_group(able)
        for engine in living:
            if engine not in self._members:
                self._fetch(engine, version)
        for engine in list(self._members):
            reply = engine.start_call(TARGET, "run", CollectiveTarget.receive, version)
            self._members[engine] = mark_seen(reply)
        try:
            return await publish(self._trainer, version)
        except BaseException:
            self._members = {}
            raise

    async def _form_group(self, engines: Sequence[Worker]) -> None:
        """Form a new group of the trainer and these engines. If that fails, all engines fetch."""
        self._epoch += 1
        self._members = {}
        size, join = len(engines) + 1, CollectiveTarget.join
        trainer = self._trainer
        store: Address = await trainer.call(SOURCE, "run", CollectiveSource.store_address)
        calls = [trainer.start_call(SOURCE, "run", CollectiveSource.join, self._epoch, size)]
        calls += [
            engine.start_call(TARGET, "run", join, store, self._epoch, rank, size)
            for rank, engine in enumerate(engines, 1)
        ]
        for call in calls:
            mark_seen(call)
        try:
            async with asyncio.timeout(MEET_TIMEOUT_S):
                await asyncio.gather(*calls)
        except (OSError, RuntimeError, SyncError, WorkerDied) as error:
            log.warning(
                "could not form a broadcast group of %d processes; engines fetch the weights "
                "over TCP: %s",
                size,
                str(error) or f"no reply within {MEET_TIMEOUT_S:g} s",
            )
            self._failed = set(engines)
            await trainer.call(SOURCE, "run", CollectiveSource.join, self._epoch, 1)
            return
        past: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        past.set_result(True)
        self._members, self._new = dict.fromkeys(engines, past), True


def _succeeded(reply: "asyncio.Future[bool]") -> bool:
    return reply.done() and not reply.cancelled() and reply.exception() is None
