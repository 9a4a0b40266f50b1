"""Weight transfer over TCP, to engines on any machine. Engines fetch; no other component waits for
them.

The trainer writes a version into a buffer and sends its bytes while it still gathers the rest. An
engine receives them on a thread, passes them on to other engines as they arrive (a tree, so that
the trainer sends each byte at most twice), and loads them once the checksum matches. If the
connection to one source fails, the engine continues with the trainer from the byte it has reached.
"""

import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch

from paceline.errors import SyncError
from paceline.remote.listener import Address, Listener, connect
from paceline.remote.message import Deferred
from paceline.remote.worker import Worker, mark_seen
from paceline.sync.block import CHUNK, Layout, Tensors, WeightBlock, add_to_checksum, check
from paceline.sync.transport import SOURCE, TARGET, Load, SourceEnd, TargetEnd, publish
from paceline.sync.weights import Weights

log = logging.getLogger(__name__)

REQUEST = struct.Struct("!qq")  # version, first byte wanted
SILENCE_S = 5.0  # without a byte from one source before the next is tried
READER_TIMEOUT_S = 0.02  # for a reader to finish before memory for another version is allocated
FAN_OUT = 2  # engines that fetch from one source


class WeightBuffer:
    """The bytes of one version as they arrive, with the readers that wait for them."""

    def __init__(self, layout: Layout, changed: threading.Condition, device: str = "cpu") -> None:
        # `changed` is shared by all buffers of a worker: a reader waits for a version, which may
        # arrive in any of them.
        self.block = WeightBlock(None, layout, device)
        self.size = len(self.block.bytes)
        self.version = -1
        self.filled = 0  # bytes that have arrived
        self.checksum = 0  # of the bytes that have arrived
        self.readers = 0
        self.failure: str | None = None
        self._changed = changed

    def begin(self, version: int) -> None:
        with self._changed:
            self.version, self.filled, self.checksum, self.failure = version, 0, 0, None
            self._changed.notify_all()

    def next_chunk(self) -> tuple[int, int]:
        """Return where the next chunk begins and ends."""
        return self.filled, min(self.size, self.filled + CHUNK)

    def advance(self) -> None:
        """Mark the next chunk as arrived."""
        start, end = self.next_chunk()
        checksum = add_to_checksum(self.checksum, self.block.bytes[start:end])
        with self._changed:
            self.filled, self.checksum = end, checksum
            self._changed.notify_all()

    def fail(self, why: str) -> None:
        with self._changed:
            self.failure = why
            self._changed.notify_all()

    def wait(self, version: int, start: int) -> int:
        """Wait for bytes of `version` beyond `start`; return their number, or 0 if there are none.

        None follow if the transfer failed or paused for SILENCE_S.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self.version > version
                    or (self.version == version and (self.filled > start or bool(self.failure)))
                ),
                SILENCE_S,
            )
            return self.filled if self.version == version and self.filled > start else 0

    def free(self) -> bool:
        """Return whether no reader is left, after a short wait for the last one."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.readers, READER_TIMEOUT_S)

    @property
    def done(self) -> bool:
        return self.failure is not None or self.filled == self.size


class StreamServer:
    """Sends the bytes of a buffer to every client that knows the token."""

    def __init__(
        self,
        host: str,
        token: bytes,
        buffer: Callable[[], WeightBuffer],
        changed: threading.Condition,
    ) -> None:
        self._buffer, self._changed = buffer, changed
        self.port = Listener(host, token, REQUEST.size, self._serve).port

    def _serve(self, connection: socket.socket, request: bytes) -> None:
        prepare(connection)
        version, start = REQUEST.unpack(request)
        if start >= 0:
            self._send(connection, version, start)

    def _send(self, connection: socket.socket, version: int, sent: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._buffer().version >= version, SILENCE_S)
            buffer = self._buffer()
            buffer.readers += 1
        try:
            while sent < buffer.size and (filled := buffer.wait(version, sent)):
                end = min(filled, sent + CHUNK)
                connection.sendall(buffer.block.bytes[sent:end].cpu().numpy().data)
                sent = end
        finally:
            with self._changed:
                buffer.readers -= 1
                self._changed.notify_all()


class StreamSource:
    """The trainer's end: gathers a version and serves it until the next one."""

    def __init__(self, layout: Layout, host: str, token: bytes) -> None:
        self._layout, self._changed = layout, threading.Condition()
        self._buffer = WeightBuffer(layout, self._changed)
        server = StreamServer(host, token, lambda: self._buffer, self._changed)
        self.address = server.port

    def write(self, tensors: Tensors, version: int) -> int:
        self._new_buffer()
        return self._fill(tensors, version)

    def _new_buffer(self) -> None:
        if not self._buffer.free():
            # A slow reader keeps reading the old buffer.
            self._buffer = WeightBuffer(self._layout, self._changed)

    def _fill(self, tensors: Tensors, version: int) -> int:
        buffer = self._buffer
        buffer.begin(version)
        block, missing = buffer.block, set(buffer.block.tensors)
        names = [name for name, _, _ in self._layout]
        for expected, (name, tensor) in zip(names, tensors, strict=False):
            if name != expected:
                raise SyncError(
                    f"the trainer exported {name} where {expected} was expected; "
                    "the order must be the same in every version"
                )
            block.tensors[name].copy_(tensor)
            missing.discard(name)
            while block.ends[name] - buffer.filled >= CHUNK:
                buffer.advance()
        block.check_complete(missing)
        while not buffer.done:
            buffer.advance()
        return buffer.checksum


class StreamTarget:
    """An engine's end: fetches a version on a thread and serves it to other engines."""

    intact = True  # the engine copies only complete, verified buffers

    def __init__(self, layout: Layout, host: str, token: bytes, device: str = "cpu") -> None:
        self._changed = threading.Condition()
        self.buffer = WeightBuffer(layout, self._changed, device)
        self.buffer.filled = self.buffer.size  # nothing is in transfer
        self._sources: Sequence[Address] = ()
        self._layout, self._token, self._device = layout, token, device
        self._thread = threading.Thread()
        server = StreamServer(host, token, lambda: self.buffer, self._changed)
        self.address = server.port

    def set_sources(self, sources: Sequence[Address]) -> None:
        """Set where to fetch from, in order of preference."""
        self._sources = sources

    def fetch(self, version: int) -> None:
        """Start to fetch a version, unless it is in transfer or complete."""
        if self.buffer.version != version or self.buffer.failure:
            self._start(version)

    def load(self, weights: Weights, into: Load) -> Deferred:
        self.fetch(weights.version)
        return Deferred(
            lambda: self.done(weights.version),
            lambda: into(self.tensors(weights).items(), weights.version),
        )

    def _start(self, version: int, *args: Any) -> None:
        if self._thread.is_alive() or not self.buffer.free():
            # The old buffer still has a writer or a reader.
            self.buffer = WeightBuffer(self._layout, self._changed, self._device)
        self.buffer.begin(version)
        self._thread = threading.Thread(
            target=self._fetch, args=(self.buffer, version, *args), name="weights", daemon=True
        )
        self._thread.start()

    def done(self, version: int) -> bool:
        return self.buffer.version != version or (self.buffer.done and not self._thread.is_alive())

    def tensors(self, weights: Weights) -> dict[str, torch.Tensor]:
        """Return the fetched tensors. Raise SyncError if they are incomplete or corrupted."""
        version = weights.version
        if self.buffer.version != version:
            raise SyncError(
                f"version {version} was replaced by version {self.buffer.version} in transfer"
            )
        if self.buffer.failure:
            raise SyncError(f"version {version} could not be fetched: {self.buffer.failure}")
        try:
            check(self.buffer.checksum, weights)
        except SyncError as error:
            self.buffer.fail(str(error))  # so that it is fetched again
            raise
        return self.buffer.block.tensors

    def _fetch(self, buffer: WeightBuffer, version: int) -> None:
        problems = []
        for source in self._sources:
            try:
                return self._fetch_from(source, buffer, version)
            except (OSError, RuntimeError) as error:  # of torch: no memory is left
                problems.append(f"{source[0]}:{source[1]}: {error}")
        buffer.fail("; ".join(problems))

    def _fetch_from(self, source: Address, buffer: WeightBuffer, version: int) -> None:
        request = REQUEST.pack(version, buffer.filled)
        with connect(source, self._token, request, SILENCE_S) as connection:
            prepare(connection)
            while not buffer.done:
                start, end = buffer.next_chunk()
                chunk = buffer.block.bytes[start:end]
                host = chunk.cpu()  # the chunk itself, unless it is on a GPU
                view, at = host.numpy().data, 0
                while at < len(view):
                    got = connection.recv_into(view[at:], 0, socket.MSG_WAITALL)
                    if not got:
                        raise ConnectionError(
                            f"the connection ended after {start + at} of {buffer.size} bytes"
                        )
                    at += got
                if host is not chunk:
                    chunk.copy_(host)
                buffer.advance()


class Stream:
    """A WeightTransport."""

    ENDS: tuple[Callable[..., SourceEnd], Callable[..., TargetEnd]] = (StreamSource, StreamTarget)

    def __init__(self, trainer: Worker, layout: Layout, token: bytes, source: Address) -> None:
        self._trainer, self._layout, self._token, self._source = trainer, layout, token, source
        self._engines: dict[Worker, Address] = {}  # in the order in which they were attached

    @classmethod
    async def connect(cls, trainer: Worker, engines: Sequence[Worker]) -> "Stream":
        layout: Layout = await trainer.call(SOURCE, "layout")
        token = secrets.token_bytes(32)
        port: int = await trainer.call(SOURCE, "open", cls.ENDS[0], layout, trainer.host, token)
        stream = cls(trainer, layout, token, (trainer.host, port))
        for engine in engines:
            await stream.attach(engine)
        return stream

    async def publish(self, version: int) -> Weights:
        for engine in self._living():  # they fetch while the trainer gathers
            self._fetch(engine, version)
        return await publish(self._trainer, version)

    async def attach(self, engine: Worker) -> None:
        """Have it fetch from an engine that was attached before it, or else from the trainer.

        An engine that is attached again keeps its place, so that no two fetch from each other.
        """
        earlier = takewhile(lambda other: other is not engine, self._living())
        before = [self._engines[other] for other in earlier]
        parent = before[(len(before) - 1) // FAN_OUT] if before else self._source
        args = self._layout, engine.host, self._token
        port: int = await engine.call(TARGET, "open", self.ENDS[1], *args)
        sources = list(dict.fromkeys([parent, self._source]))
        await engine.call(TARGET, "run", StreamTarget.set_sources, sources)
        self._engines[engine] = engine.host, port

    def _fetch(self, engine: Worker, version: int) -> None:
        mark_seen(engine.start_call(TARGET, "run", StreamTarget.fetch, version))

    def _living(self) -> dict[Worker, Address]:
        self._engines = {
            engine: address for engine, address in self._engines.items() if not engine.died.done()
        }
        return self._engines


def prepare(connection: socket.socket) -> None:
    """Set kernel timeouts and disable Nagle's algorithm.

    With kernel timeouts a call transfers a whole chunk; with Python's it would return per buffer.
    """
    connection.settimeout(None)
    limit = struct.pack("@ll", int(SILENCE_S), int(SILENCE_S % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
