"""Weights by broadcast, over a group of processes made for nothing else: NCCL between GPUs, gloo between CPUs.

The trainer broadcasts pieces while it gathers the rest. An engine that is new, late or back is not in the circle: it fetches the version
over TCP like any other stream, and joins when the next one is made. If a broadcast fails, whoever took part goes on over TCP from where
it is. So nobody waits for an engine longer than one timeout, and no engine is without a way.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paceline.errors import SyncError, WorkerDied
from paceline.remote.group import use_interface
from paceline.remote.worker import Worker, seen
from paceline.sync.block import PIECE, Layout
from paceline.sync.stream import Address, Stream, StreamReceiver, StreamSource, WeightBuffer
from paceline.sync.weights import Weights
from paceline.types import Role

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0  # of one piece, and of meeting
MEET_TIMEOUT_S = 30.0
AHEAD = 3  # pieces that are broadcast at the same time


class BroadcastGroup:
    """The trainer (rank 0) and some engines, apart from whatever groups either of them is in."""

    def __init__(self, store: Address, epoch: int, rank: int, size: int) -> None:
        import torch
        import torch.distributed

        dist: Any = torch.distributed
        use_interface(store[0])
        meeting = dist.TCPStore(
            *store,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=MEET_TIMEOUT_S),
        )
        prefix = dist.PrefixStore(f"circle {epoch}", meeting)
        timeout = timedelta(seconds=TIMEOUT_S)
        if torch.cuda.is_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = dist.ProcessGroupNCCL(prefix, rank, size, options)
            self._bucket: torch.Tensor | None = torch.empty(PIECE, dtype=torch.uint8, device="cuda")
            self._stream = torch.cuda.Stream()
        else:
            self._group = dist.ProcessGroupGloo(prefix, rank, size, timeout)
            self._bucket = None
        self._first = dist.BroadcastOptions()
        self._first.rootRank = 0

    def broadcast(self, piece: "torch.Tensor", send: bool) -> None:
        """The trainer's piece to all; it is in place when this returns."""
        self.start(piece, send)()

    def start(self, piece: "torch.Tensor", send: bool) -> Callable[[], object]:
        """Begin to broadcast the trainer's piece to all. It is in place when what is returned has been called. Pieces that are under way
        at the same time must be the same, in the same order, everywhere."""
        import torch

        if self._bucket is None:
            waiting: Callable[[], object] = self._group.broadcast([piece], self._first).wait
            return waiting
        with torch.cuda.stream(self._stream):  # beside whatever this device computes
            bucket = self._bucket[: len(piece)]
            if send:
                bucket.copy_(piece, non_blocking=True)
            self._group.broadcast([bucket], self._first).wait()
            if not send:
                piece.copy_(bucket, non_blocking=True)
        return self._stream.synchronize


class PendingBroadcasts:
    """Pieces that are being broadcast, oldest first: the next ones travel while one is filled or summed."""

    def __init__(self, group: BroadcastGroup, send: bool) -> None:
        self._broadcast_group, self._send = group, send
        self._pending: deque[Callable[[], object]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, piece: "torch.Tensor") -> None:
        self._pending.append(self._broadcast_group.start(piece, self._send))

    def finish_one(self) -> None:
        self._pending.popleft()()

    def finish(self) -> None:
        while self._pending:
            self.finish_one()

    def give_up(self) -> None:
        """Wait until none is written to or read from any more: with one of them the others fail."""
        while self._pending:
            with contextlib.suppress(RuntimeError):
                self.finish_one()


class CollectiveSource(StreamSource):
    """In the trainer's worker."""

    def __init__(self, layout: Layout, host: str, token: bytes) -> None:
        import torch.distributed

        dist: Any = torch.distributed
        super().__init__(layout, host, token)
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.store: Address = host, self._store.port
        self._broadcast_group: BroadcastGroup | None = None
        self._sender = threading.Thread()

    def join(self, epoch: int, size: int) -> None:
        self._broadcast_group = BroadcastGroup(self.store, epoch, 0, size) if size > 1 else None

    def write(self, tensors: "Iterable[tuple[str, torch.Tensor]]", version: int) -> int:
        if self._sender.is_alive():
            self._sender.join()
        if self._broadcast_group is None:
            return super().write(tensors, version)
        self._new_buffer()
        self._buffer.readers += 1
        self._sender = threading.Thread(
            target=self._send,
            args=(self._broadcast_group, self._buffer, version),
            name="weights",
            daemon=True,
        )
        self._sender.start()
        return self._fill(tensors, version)

    def _send(self, group: BroadcastGroup, buffer: WeightBuffer, version: int) -> None:
        sent, pending = 0, PendingBroadcasts(group, send=True)
        try:
            while sent < buffer.size and (filled := buffer.wait(version, sent)):
                while sent < filled:
                    end = min(filled, sent + PIECE)
                    if len(pending) == AHEAD:
                        pending.finish_one()
                    pending.start(buffer.block.bytes[sent:end])
                    sent = end
            pending.finish()
        except RuntimeError as error:
            pending.give_up()
            self._broadcast_group = None
            log.warning(
                "the broadcast of version %d failed, engines fetch the rest: %s", version, error
            )
        finally:
            with self._changed:
                buffer.readers -= 1
                self._changed.notify_all()


class CollectiveReceiver(StreamReceiver):
    """In an engine's worker."""

    def __init__(self, layout: Layout, host: str, token: bytes) -> None:
        import torch

        super().__init__(layout, host, token, "cuda" if torch.cuda.is_available() else "cpu")
        self._broadcast_group: BroadcastGroup | None = None

    def join(self, store: Address, epoch: int, rank: int, size: int) -> None:
        self._broadcast_group = BroadcastGroup(store, epoch, rank, size)

    def receive(self, version: int) -> None:
        """Begin to take part in a broadcast."""
        group, self._broadcast_group = self._broadcast_group, None  # back when all went well
        self._start(version, group)

    @property
    def in_broadcast_group(self) -> bool:
        return self._broadcast_group is not None

    def _fetch(
        self, buffer: WeightBuffer, version: int, group: BroadcastGroup | None = None
    ) -> None:
        if group is not None:
            pending = PendingBroadcasts(group, send=False)
            try:
                self._receive(buffer, pending)
                self._broadcast_group = group
                return
            except RuntimeError as error:
                pending.give_up()
                log.warning(
                    "the broadcast of version %d failed, the rest is fetched: %s", version, error
                )
        super()._fetch(buffer, version)

    def _receive(self, buffer: WeightBuffer, pending: PendingBroadcasts) -> None:
        expected = buffer.filled
        while not buffer.done:
            while expected < buffer.size and len(pending) < AHEAD:
                end = min(buffer.size, expected + PIECE)
                pending.start(buffer.block.bytes[expected:end])
                expected = end
            pending.finish_one()
            buffer.advance()


class Collective(Stream):
    """The transport, as the controller sees it."""

    KIND = "collective"

    def __init__(self, trainer: Worker, layout: Layout, token: bytes, source: Address) -> None:
        super().__init__(trainer, layout, token, source)
        self._rounds: dict[
            Worker, asyncio.Future[bool]
        ] = {}  # members, and whether they got all of the last version by broadcast
        self._epoch = 0
        self._new = False  # the circle has not broadcast a whole version yet
        self._failed: set[Worker] = set()

    async def publish(self, version: int) -> Weights:
        living = list(self._living())
        able = [
            engine
            for engine in living
            if engine not in self._rounds or _answered(self._rounds[engine])
        ]
        went_well = all(_answered(answer) and answer.result() for answer in self._rounds.values())
        if self._new and not went_well:
            self._failed = set(self._rounds)  # not even their first broadcast went through
        self._new = self._new and not went_well
        if set(able) == self._failed:
            self._rounds = {}  # they fetch, until the circle would be another
        elif able != list(self._rounds) or not went_well:
            await self._meet(able)
        for engine in living:
            if engine not in self._rounds:
                engine.start_call(Role.ROLLOUT, "fetch_weights", version).add_done_callback(seen)
        for engine in list(self._rounds):
            self._rounds[engine] = engine.start_call(Role.ROLLOUT, "receive_weights", version)
            self._rounds[engine].add_done_callback(seen)
        try:
            checksum: int = await self._trainer.call(Role.ACTOR, "publish_weights", version)
        except BaseException:
            self._rounds = {}
            raise
        return Weights(version, checksum)

    async def _meet(self, engines: Sequence[Worker]) -> None:
        """Make a new circle of the trainer and these. If they do not come together, all fetch."""
        self._epoch += 1
        self._rounds = {}
        size = len(engines) + 1
        store: Address = await self._trainer.call(Role.ACTOR, "broadcast_store")
        calls = [self._trainer.start_call(Role.ACTOR, "join_broadcast_group", self._epoch, size)]
        calls += [
            engine.start_call(Role.ROLLOUT, "join_broadcast_group", store, self._epoch, rank, size)
            for rank, engine in enumerate(engines, 1)
        ]
        for call in calls:
            call.add_done_callback(seen)
        try:
            async with asyncio.timeout(MEET_TIMEOUT_S):
                await asyncio.gather(*calls)
        except (TimeoutError, RuntimeError, SyncError, WorkerDied) as error:
            log.warning("no circle of %d came together, so engines fetch: %s", size, error)
            self._failed = set(engines)
            await self._trainer.call(Role.ACTOR, "join_broadcast_group", self._epoch, 1)
            return
        past: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        past.set_result(True)
        self._rounds, self._new = dict.fromkeys(engines, past), True


def _answered(answer: "asyncio.Future[bool]") -> bool:
    return answer.done() and not answer.cancelled() and answer.exception() is None
