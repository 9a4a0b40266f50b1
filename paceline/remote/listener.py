"""TCP connections between the parts of a run, only for those that know its token.

    server -> 32 random bytes
    client -> 32 random bytes, message, HMAC(token, "client", server's bytes, message)
    server -> HMAC(token, "server", client's bytes)

The token itself never travels, and each side knows the other one. One thread serves all clients
that have not proven themselves yet: it holds few of them, the oldest gives way to a new one, and
each has a deadline. So connections of strangers, silent or not, use up no threads or descriptors.
"""

import _thread
import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

Address = tuple[str, int]
Serve = Callable[[socket.socket, bytes], None]

NONCE, PROOF = 32, 32  # bytes
PROOF_TIMEOUT_S = 5.0
MAX_STRANGERS = 64  # clients that have not proven themselves
MAX_CLIENTS = 512  # clients that have
RETRY_S = 0.1  # until the next connection is accepted, if no descriptors or memory are left


@dataclass(slots=True)
class _Stranger:
    connection: socket.socket
    nonce: bytes
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class Listener:
    """Serves every client that proves that it knows the token, on a thread."""

    def __init__(self, host: str, token: bytes, message_size: int, serve: Serve) -> None:
        """`serve(connection, message)`: its end closes the connection, unless it is detached."""
        self._token, self._expected, self._serve = token, NONCE + message_size + PROOF, serve
        self._socket = socket.create_server((host, 0))
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._address = self._socket.getsockname()
        self.port: int = self._address[1]
        self._strangers: dict[int, _Stranger] = {}  # by descriptor, oldest first
        self._clients = threading.BoundedSemaphore(MAX_CLIENTS)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections. Those of clients stay open."""
        self._closing = True
        with socket.socket(self._socket.family) as wake:
            wake.connect_ex(self._address)
        self._thread.join(RETRY_S + 1)

    def _run(self) -> None:
        with self._socket, self._selector:
            while not self._closing:
                try:
                    self._serve_strangers()
                except MemoryError:
                    time.sleep(RETRY_S)
            for stranger in list(self._strangers.values()):
                self._drop(stranger)

    def _serve_strangers(self) -> None:
        for key, _ in self._selector.select(self._time_left()):
            if key.fileobj is self._socket:
                self._accept()
            elif stranger := self._strangers.get(key.fd):
                self._read(stranger)
        self._drop_overdue()

    def _time_left(self) -> float | None:
        if not self._strangers:
            return None
        oldest = next(iter(self._strangers.values()))
        return max(0.0, oldest.deadline - time.monotonic())

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:  # no descriptors are left, or the client is gone
            log.warning("a connection was not accepted: %s", error)
            for stranger in list(self._strangers.values()):
                self._drop(stranger)
            time.sleep(RETRY_S)
            return
        stranger = _Stranger(
            connection, secrets.token_bytes(NONCE), time.monotonic() + PROOF_TIMEOUT_S
        )
        try:
            connection.setblocking(False)
            connection.send(stranger.nonce)
            self._selector.register(connection, selectors.EVENT_READ)
        except OSError:
            connection.close()
            return
        self._strangers[connection.fileno()] = stranger
        if len(self._strangers) > MAX_STRANGERS:
            self._drop(next(iter(self._strangers.values())))

    def _read(self, stranger: _Stranger) -> None:
        try:
            data = stranger.connection.recv(self._expected - len(stranger.received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        stranger.received += data
        if not data:
            self._drop(stranger)
        elif len(stranger.received) == self._expected:
            self._admit(stranger)

    def _admit(self, stranger: _Stranger) -> None:
        received = bytes(stranger.received)
        nonce, message, proof = received[:NONCE], received[NONCE:-PROOF], received[-PROOF:]
        expected = _proof(self._token, b"client", stranger.nonce + message)
        known = hmac.compare_digest(proof, expected)
        if not known or not self._clients.acquire(blocking=False):
            self._drop(stranger)
            return
        self._forget(stranger)
        stranger.connection.settimeout(PROOF_TIMEOUT_S)
        answer = _proof(self._token, b"server", nonce)
        try:
            # Thread.start would wait forever for a thread that fails to start for lack of memory.
            _thread.start_new_thread(self._serve_client, (stranger.connection, answer, message))
        except (RuntimeError, MemoryError) as error:
            stranger.connection.close()
            self._clients.release()
            log.warning("a client was not served: %s", error)

    def _serve_client(self, connection: socket.socket, answer: bytes, message: bytes) -> None:
        try:
            with connection:
                connection.sendall(answer)
                self._serve(connection, message)
        except OSError as error:
            log.info("a connection ended: %s", error)
        finally:
            self._clients.release()

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        for stranger in [s for s in self._strangers.values() if s.deadline <= now]:
            self._drop(stranger)

    def _drop(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.connection.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger.connection.fileno()]


def connect(address: Address, token: bytes, message: bytes, timeout_s: float) -> socket.socket:
    """Connect to a Listener. Raise OSError if it is unresponsive or one side's token is wrong."""
    connection = socket.create_connection(address, timeout=timeout_s)
    try:
        nonce, challenge = secrets.token_bytes(NONCE), receive(connection, NONCE)
        connection.sendall(nonce + message + _proof(token, b"client", challenge + message))
        if not hmac.compare_digest(receive(connection, PROOF), _proof(token, b"server", nonce)):
            raise ConnectionError("the other side does not know the token")
    except BaseException:
        connection.close()
        raise
    return connection


def receive(connection: socket.socket, size: int) -> bytes:
    """Return exactly `size` bytes."""
    data = bytearray()
    while len(data) < size:
        if not (part := connection.recv(size - len(data))):
            raise ConnectionError("the connection ended early")
        data += part
    return bytes(data)


def _proof(token: bytes, side: bytes, data: bytes) -> bytes:
    return hmac.digest(token, side + data, "sha256")
