"""Weights over TCP, to engines on any machine. Engines fetch: one that is new, late or back asks like any other, and nobody waits for it.

The trainer writes a version into a block and sends its bytes on while it still gathers the rest. An engine receives them beside its
work, passes them on to others as they come (a tree, so that the trainer sends each byte once or twice, however many engines there
are), and swaps them in whole once the checksum is right. If the one it fetches from fails, it goes on with the trainer from where it is.
"""

import hmac
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import SyncError
from paceline.remote.worker import Worker, seen
from paceline.sync.block import PIECE, Layout, WeightBlock, add_to_checksum, check
from paceline.sync.weights import Weights
from paceline.types import Role

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

Address = tuple[str, int]

REQUEST = struct.Struct("!32sqq")  # token, version, first byte wanted
SILENCE_S = 5.0  # without a byte from one source before the next is asked
PATIENCE_S = 0.02  # before memory for another version is made
FAN_OUT = 2  # engines that fetch from one


class WeightBuffer:
    """One version's bytes as they arrive, and whoever waits for them."""

    def __init__(self, layout: Layout, changed: threading.Condition, device: str = "cpu") -> None:
        """`changed` is shared by all shelves of a worker: who waits for a version does not know on which it will be."""
        self.block = WeightBlock(None, layout, device)
        self.size = len(self.block.bytes)
        self.version = -1
        self.filled = 0  # bytes that are there
        self.checksum = 0  # of these
        self.readers = 0
        self.failure: str | None = None
        self._changed = changed

    def begin(self, version: int) -> None:
        with self._changed:
            self.version, self.filled, self.checksum, self.failure = version, 0, 0, None
            self._changed.notify_all()

    def piece(self) -> tuple[int, int]:
        """Where the next piece begins and ends."""
        return self.filled, min(self.size, self.filled + PIECE)

    def advance(self) -> None:
        """The next piece is there."""
        start, end = self.piece()
        checksum = add_to_checksum(self.checksum, self.block.bytes[start:end])
        with self._changed:
            self.filled, self.checksum = end, checksum
            self._changed.notify_all()

    def fail(self, why: str) -> None:
        with self._changed:
            self.failure = why
            self._changed.notify_all()

    def wait(self, version: int, start: int) -> int:
        """How many bytes of `version` are there, once there are more than `start`; 0 when there will not be, or not in time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.version > version or (self.version == version and self.filled > start),
                SILENCE_S,
            )
            return self.filled if self.version == version and self.filled > start else 0

    def free(self) -> bool:
        """Whether nobody reads it any more. Who has sent the last byte is given a moment to say so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.readers, PATIENCE_S)

    @property
    def done(self) -> bool:
        return self.failure is not None or self.filled == self.size


class StreamServer:
    """Sends the bytes of a shelf to whoever knows the token and asks for a version that is there, or on its way."""

    def __init__(
        self,
        host: str,
        token: bytes,
        buffer: Callable[[], WeightBuffer],
        changed: threading.Condition,
    ) -> None:
        self._token, self._buffer, self._changed = token, buffer, changed
        self._socket = socket.create_server((host, 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="weights", daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(
                target=self._serve, args=(connection,), name="weights", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                prepare(connection)
                token, version, start = REQUEST.unpack(_receive(connection, REQUEST.size))
                if hmac.compare_digest(token, self._token):
                    self._send(connection, version, start)
            except OSError as error:
                log.info("sending weights ended: %s", error)

    def _send(self, connection: socket.socket, version: int, sent: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._buffer().version >= version, SILENCE_S)
            buffer = self._buffer()
            buffer.readers += 1
        try:
            while sent < buffer.size and (filled := buffer.wait(version, sent)):
                end = min(filled, sent + PIECE)
                connection.sendall(buffer.block.bytes[sent:end].cpu().numpy().data)
                sent = end
        finally:
            with self._changed:
                buffer.readers -= 1
                self._changed.notify_all()


class StreamSource:
    """In the trainer's worker: gathers a version and serves it, the last one for as long as somebody reads it."""

    def __init__(self, layout: Layout, host: str, token: bytes) -> None:
        self._layout, self._changed = layout, threading.Condition()
        self._buffer = WeightBuffer(layout, self._changed)
        self.server = StreamServer(host, token, lambda: self._buffer, self._changed)

    def write(self, tensors: "Iterable[tuple[str, torch.Tensor]]", version: int) -> int:
        """Returns the checksum. Engines that ask meanwhile get the bytes that are there."""
        self._new_buffer()
        return self._fill(tensors, version)

    def _new_buffer(self) -> None:
        if not self._buffer.free():
            self._buffer = WeightBuffer(
                self._layout, self._changed
            )  # whoever is slow goes on reading the old one

    def _fill(self, tensors: "Iterable[tuple[str, torch.Tensor]]", version: int) -> int:
        buffer = self._buffer
        buffer.begin(version)
        block, missing, names = (
            buffer.block,
            set(buffer.block.tensors),
            [name for name, _, _ in self._layout],
        )
        for expected, (name, tensor) in zip(names, tensors, strict=False):
            if name != expected:
                raise SyncError(
                    f"the trainer exported {name} where {expected} was expected; the order may not change between versions"
                )
            block.tensors[name].copy_(tensor)
            missing.discard(name)
            while block.ends[name] - buffer.filled >= PIECE:
                buffer.advance()
        block.check_complete(missing)
        while not buffer.done:
            buffer.advance()
        return buffer.checksum


class StreamReceiver:
    """In an engine's worker: fetches a version on a thread, and passes it on."""

    def __init__(self, layout: Layout, host: str, token: bytes, device: str = "cpu") -> None:
        self._changed = threading.Condition()
        self.buffer = WeightBuffer(layout, self._changed, device)
        self.buffer.filled = self.buffer.size  # nothing is on its way
        self.sources: Sequence[Address] = ()
        self._layout, self._token, self._device = layout, token, device
        self._thread = threading.Thread()
        self.server = StreamServer(host, token, lambda: self.buffer, self._changed)

    def fetch(self, version: int) -> None:
        """Begin, unless it is on its way or here already."""
        if self.buffer.version == version and not self.buffer.failure:
            return
        self._start(version)

    def _start(self, version: int, *args: Any) -> None:
        if not (self.buffer.done and self.buffer.free()):
            self.buffer = WeightBuffer(
                self._layout, self._changed, self._device
            )  # somebody is still at the old one
        self.buffer.begin(version)
        self._thread = threading.Thread(
            target=self._fetch, args=(self.buffer, version, *args), name="weights", daemon=True
        )
        self._thread.start()

    def done(self, version: int) -> bool:
        return self.buffer.version != version or (self.buffer.done and not self._thread.is_alive())

    def tensors(self, weights: Weights) -> "dict[str, torch.Tensor]":
        """What was fetched, if it is that."""
        if self.buffer.version != weights.version:
            raise SyncError(
                f"version {weights.version} was overtaken by version {self.buffer.version}"
            )
        if self.buffer.failure:
            raise SyncError(
                f"version {weights.version} could not be fetched: {self.buffer.failure}"
            )
        try:
            check(self.buffer.checksum, weights)
        except SyncError as error:
            self.buffer.fail(str(error))  # so that it is fetched again
            raise
        return self.buffer.block.tensors

    def _fetch(self, buffer: WeightBuffer, version: int) -> None:
        problems = []
        for source in self.sources:
            try:
                return self._fetch_from(source, buffer, version)
            except OSError as error:
                problems.append(f"{source[0]}:{source[1]}: {error}")
        buffer.fail("; ".join(problems))

    def _fetch_from(self, source: Address, buffer: WeightBuffer, version: int) -> None:
        with socket.create_connection(source, timeout=SILENCE_S) as connection:
            prepare(connection)
            connection.sendall(REQUEST.pack(self._token, version, buffer.filled))
            while not buffer.done:
                start, end = buffer.piece()
                piece = buffer.block.bytes[start:end]
                host = piece.cpu()  # the piece itself, unless it is on a device
                view, at = host.numpy().data, 0
                while at < len(view):
                    got = connection.recv_into(view[at:], 0, socket.MSG_WAITALL)
                    if not got:
                        raise ConnectionError(
                            f"the connection ended after {start + at} of {buffer.size} bytes"
                        )
                    at += got
                if host is not piece:
                    piece.copy_(host)
                buffer.advance()


class Stream:
    """The transport, as the controller sees it."""

    KIND = "stream"  # what workers make for it

    def __init__(self, trainer: Worker, layout: Layout, token: bytes, source: Address) -> None:
        self._trainer, self._layout, self._token, self._source = trainer, layout, token, source
        self._engines: dict[Worker, Address] = {}  # in the order in which they came

    @classmethod
    async def connect(cls, trainer: Worker, engines: Sequence[Worker]) -> "Stream":
        layout: Layout = await trainer.call(Role.ACTOR, "weights_layout")
        token = secrets.token_bytes(32)
        port: int = await trainer.call(
            Role.ACTOR, "stream_weights", cls.KIND, layout, trainer.host, token
        )
        stream = cls(trainer, layout, token, (trainer.host, port))
        for engine in engines:
            await stream.attach(engine)
        return stream

    async def publish(self, version: int) -> Weights:
        for engine in self._living():
            engine.start_call(Role.ROLLOUT, "fetch_weights", version).add_done_callback(
                seen
            )  # while the trainer gathers
        checksum: int = await self._trainer.call(Role.ACTOR, "publish_weights", version)
        return Weights(version, checksum)

    async def attach(self, engine: Worker) -> None:
        """It fetches from one that came before it, or else from the trainer."""
        before = [address for other, address in self._living().items() if other is not engine]
        parent = before[(len(before) - 1) // FAN_OUT] if before else self._source
        sources = list(dict.fromkeys([parent, self._source]))
        port: int = await engine.call(
            Role.ROLLOUT,
            "stream_weights",
            self.KIND,
            self._layout,
            engine.host,
            self._token,
            sources,
        )
        self._engines[engine] = engine.host, port

    def _living(self) -> dict[Worker, Address]:
        self._engines = {
            engine: address for engine, address in self._engines.items() if not engine.died.done()
        }
        return self._engines


def prepare(connection: socket.socket) -> None:
    """Large pieces: the kernel waits, with a limit, until one is through (Python would look after every buffer), and the end of a piece
    does not wait for the next."""
    connection.settimeout(None)
    limit = struct.pack("@ll", int(SILENCE_S), int(SILENCE_S % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (part := connection.recv(size - len(data))):
            raise ConnectionError("the connection ended early")
        data += part
    return data
