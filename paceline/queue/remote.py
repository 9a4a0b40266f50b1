"""The message queue for other processes and machines: a server beside the queue, a client wherever rollouters and trainer ranks are.

Groups travel as flat arrays (`wire.py`) and lie in the queue as the bytes that came; only who takes one reads it. A put is answered
when the item is in, so a client that lost the answer puts again under the same key. What a trainer rank takes is leased: it comes back
if the rank's connection ends before `acknowledge`, or if nobody waits for it any more when it arrives. A producer whose incarnation has
been replaced is refused.

An address is "unix:/path" or "tcp://host:port"; who connects must know the token.
"""

import asyncio
import hmac
import itertools
import json
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, PacelineError, WorkerDied
from paceline.queue.message_queue import FencedError, FutureVersionError, MessageQueue, Producer
from paceline.queue.wire import Buffer, decode, encode
from paceline.types import Group

Header = dict[str, Any]

_LENGTHS = struct.Struct("<IQ")  # of the header and of what follows it
_ERRORS = {error.__name__: error for error in (FencedError, FutureVersionError, TimeoutError)}
_LEFT = (asyncio.IncompleteReadError, ConnectionError)
WINDOW = 1 << 22  # bytes a socket holds before the sender waits
HANDSHAKE_TIMEOUT_S, HELLO_BYTES = 10.0, 4096  # for a newcomer to say who it is


class QueueServer:
    def __init__(self, queue: MessageQueue, token: str) -> None:
        self.queue = queue
        self.address = ""
        self._token = token
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, queue: MessageQueue, address: str, token: str) -> "QueueServer":
        """Serve at "unix:/path" or "tcp://host:port" (port 0: any); `address` of the result says where."""
        server = cls(queue, token)
        kind, place = _parse(address)
        if kind == "unix":
            server._server = await asyncio.start_unix_server(server._connected, place, limit=WINDOW)
            server.address = address
        else:
            host, _, port = place.rpartition(":")
            server._server = await asyncio.start_server(
                server._connected, host, int(port), limit=WINDOW
            )
            server.address = f"tcp://{host}:{server._server.sockets[0].getsockname()[1]}"
        return server

    async def close(self) -> None:
        if self._server:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        kind, place = _parse(self.address)
        if kind == "unix":
            Path(place).unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._connections.add(task)
        connection = _Connection(self.queue, writer)
        _widen(writer)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                hello, _ = await _receive(reader, HELLO_BYTES)
            if not hmac.compare_digest(str(hello["token"]), self._token):
                return
            if hello["producer"]:
                connection.producer = Producer(*hello["producer"])
                self.queue.fence(
                    Producer(connection.producer.name, connection.producer.incarnation - 1)
                )  # a new one replaces the old
            _write(writer, {"welcome": True})
            while True:
                header, body = await _receive(reader)
                connection.answer(header, body)
                await writer.drain()  # who does not read its answers is not asked for more
        except (
            *_LEFT,
            TimeoutError,
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
            asyncio.CancelledError,
        ):
            pass  # it has left, it never spoke our language, or we are closing
        finally:
            connection.end()
            writer.close()
            self._connections.discard(task)


class _Connection:
    """The server's end of one client. A request that cannot be answered yet waits, and lets later ones pass."""

    def __init__(self, queue: MessageQueue, writer: asyncio.StreamWriter) -> None:
        self.producer: Producer | None = None
        self._queue = queue
        self._writer = writer
        self._leases: set[int] = set()
        self._waiting: set[asyncio.Task[None]] = set()

    def answer(self, header: Header, body: Buffer) -> None:
        if header["action"] in ("acknowledge", "give_back"):
            self._leases.discard(header["lease"])
            getattr(self._queue, header["action"])(header["lease"])
        elif not self._try(header, body):
            task = asyncio.ensure_future(self._wait(header, body))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)

    def end(self) -> None:
        for task in self._waiting:
            task.cancel()
        for lease in self._leases:
            self._queue.give_back(lease)

    async def _wait(self, header: Header, body: Buffer) -> None:
        awaited = self._queue.freed if header["action"] == "put" else self._queue.changed
        try:
            async with asyncio.timeout(header.get("timeout_s")):
                while not self._try(header, body):
                    await awaited.wait()
        except TimeoutError as error:
            self._refuse(header, error)

    def _try(self, header: Header, body: Buffer) -> bool:
        """Answer, if that can be done now."""
        try:
            return self._put(header, body) if header["action"] == "put" else self._get(header)
        except PacelineError as error:
            self._refuse(header, error)
            return True

    def _put(self, header: Header, body: Buffer) -> bool:
        if header["wait"] and self._queue.full(len(body)):
            return False
        taken = self._queue.put(body, header["version"], header["key"], len(body), self.producer)
        _write(self._writer, {"id": header["id"], "in": taken})
        return True

    def _get(self, header: Header) -> bool:
        leased = self._queue.lease(header["count"], header["version"])
        if leased is None:
            return False
        lease, items = leased
        self._leases.add(lease)
        payloads = [
            item.payload if isinstance(item.payload, Buffer) else encode(item.payload)
            for item in items
        ]
        _write(
            self._writer,
            {"id": header["id"], "lease": lease, "sizes": [len(payload) for payload in payloads]},
            *payloads,
        )
        return True

    def _refuse(self, header: Header, error: Exception) -> None:
        _write(
            self._writer, {"id": header["id"], "error": type(error).__name__, "message": str(error)}
        )


class RemoteQueueClient:
    """`put_samples` and `get_samples` of a queue in another process."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str
    ) -> None:
        self._reader, self._writer, self._address = reader, writer, address
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[tuple[Header, Buffer]]] = {}
        self._leases: list[int] = []
        self._listener = asyncio.ensure_future(self._listen())

    @classmethod
    async def connect(
        cls, address: str, token: str, producer: Producer | None = None
    ) -> "RemoteQueueClient":
        """`producer`: who puts; a later incarnation under the same name shuts this one out."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                reader, writer = await _open(address)
        except OSError as error:
            raise WorkerDied(
                f"nobody serves a message queue at {address}: {str(error) or 'no answer'}"
            ) from None
        try:
            _write(
                writer,
                {
                    "token": token,
                    "producer": [producer.name, producer.incarnation] if producer else None,
                },
            )
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await _receive(reader, HELLO_BYTES)
        except (*_LEFT, ValueError, TimeoutError) as error:
            writer.close()
            why = (
                "did not let us in: the token is another one"
                if isinstance(error, _LEFT)
                else "is none: it does not speak our language"
            )
            raise ConfigError(f"the queue at {address} {why}") from None
        return cls(reader, writer, address)

    async def put_samples(
        self,
        samples: Group,
        param_version: int,
        key: int | str | None = None,
        *,
        wait: bool = False,
    ) -> bool:
        """True if they are in, False if the key was put before. `wait`: for room, instead of dropping the oldest."""
        header = {
            "action": "put",
            "version": param_version,
            "key": samples.seq if key is None else key,
            "wait": wait,
        }
        reply, _ = await self._ask(header, encode(samples))
        return bool(reply["in"])

    async def get_samples(
        self, count: int = 1, *, current_param_version: int, timeout_s: float | None = None
    ) -> list[Group]:
        """`count` fresh samples, oldest first, ours until `acknowledge`; TimeoutError when they do not come in time."""
        reply, body = await self._ask(
            {
                "action": "get",
                "count": count,
                "version": current_param_version,
                "timeout_s": timeout_s,
            }
        )
        self._leases.append(reply["lease"])
        view, ends = memoryview(body), list(itertools.accumulate(reply["sizes"]))
        return [
            decode(view[end - size : end]) for size, end in zip(reply["sizes"], ends, strict=True)
        ]

    async def acknowledge(self) -> None:
        """All that was taken so far has been used, and must not come back."""
        leases, self._leases = self._leases, []
        for lease in leases:
            _write(self._writer, {"action": "acknowledge", "lease": lease})
        await self._writer.drain()

    async def close(self) -> None:
        self._listener.cancel()
        self._writer.close()
        with suppress(ConnectionError, asyncio.CancelledError):
            await self._listener
            await self._writer.wait_closed()

    async def _ask(self, header: Header, body: Buffer = b"") -> tuple[Header, Buffer]:
        if self._listener.done():
            raise self._lost()
        number = next(self._ids)
        self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            _write(self._writer, {"id": number, **header}, body)
            await self._writer.drain()
            reply, body = await self._pending[number]
        except ConnectionError:
            raise self._lost() from None
        finally:
            del self._pending[number]
        if "error" in reply:
            raise _ERRORS.get(reply["error"], PacelineError)(reply["message"])
        return reply, body

    async def _listen(self) -> None:
        try:
            while True:
                header, body = await _receive(self._reader)
                if (future := self._pending.get(header["id"])) and not future.done():
                    future.set_result((header, body))
                elif "lease" in header:  # whoever asked was cancelled meanwhile
                    _write(self._writer, {"action": "give_back", "lease": header["lease"]})
        except (*_LEFT, ValueError, KeyError, TypeError):
            self._writer.close()  # it has left, or does not speak our language any more
        finally:
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(self._lost())

    def _lost(self) -> WorkerDied:
        return WorkerDied(f"the message queue at {self._address} is gone")


async def _open(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    kind, place = _parse(address)
    if kind == "unix":
        reader, writer = await asyncio.open_unix_connection(place, limit=WINDOW)
    else:
        host, _, port = place.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=WINDOW)
    _widen(writer)
    return reader, writer


def _write(writer: asyncio.StreamWriter, header: Header, *bodies: Buffer) -> None:
    head = json.dumps(header, separators=(",", ":")).encode()
    writer.write(_LENGTHS.pack(len(head), sum(len(body) for body in bodies)) + head)
    for body in bodies:
        writer.write(body)


def _widen(writer: asyncio.StreamWriter) -> None:
    """Let the system hold more on the way, so that both ends wake up less often."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WINDOW)


async def _receive(reader: asyncio.StreamReader, most: int = 1 << 40) -> tuple[Header, Buffer]:
    head_length, body_length = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    if head_length + body_length > most:
        raise ValueError(f"{head_length + body_length} bytes are more than {most}")
    header: Header = json.loads(await reader.readexactly(head_length))
    return header, await reader.readexactly(body_length) if body_length else b""


def _parse(address: str) -> tuple[str, str]:
    for kind, prefix in (("unix", "unix:"), ("tcp", "tcp://")):
        if address.startswith(prefix):
            place = address.removeprefix(prefix)
            if kind == "unix" or place.rpartition(":")[2].isdigit():
                return kind, place
    raise ConfigError(
        f"{address!r} is not the address of a queue; write unix:/path or tcp://host:port"
    )
