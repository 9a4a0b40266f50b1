"""Where the members of a broadcast group exchange their addresses, before they connect.

The store of torch.distributed listens on all networks and serves everyone. This one listens on the
trainer's address and serves members that know the token. NCCL calls its store from several threads,
so it gets the store of torch, but only on the trainer's address. The connections of gloo and NCCL
themselves have no authentication.
"""

import socket
import struct
import threading
from datetime import timedelta
from typing import Any

import torch

from paceline.remote.listener import Address, Listener, connect, receive

dist: Any = torch.distributed

# Operation, size of the key, size of the value, seconds to wait for the key.
REQUEST = struct.Struct("!BIId")
REPLY = struct.Struct("!BI")  # whether it succeeded, size of the value
SET, GET, ADD, CHECK = range(4)
MAX_WAIT_S = 600.0
MAX_BYTES = 1 << 20  # of a key or a value; addresses have some hundred


class Meeting:
    """The trainer's end: the store itself."""

    def __init__(self, host: str, token: bytes) -> None:
        if torch.cuda.is_available():
            listening = socket.create_server((host, 0))
            self.address: Address = host, listening.getsockname()[1]
            options = {"wait_for_workers": False, "master_listen_fd": listening.detach()}
            self._store = dist.TCPStore(*self.address, is_master=True, **options)
        else:
            self._store = dist.HashStore()
            self.address = host, Listener(host, token, 0, self._serve).port

    def _serve(self, connection: socket.socket, _: bytes) -> None:
        connection.settimeout(None)
        while True:
            operation, key_size, value_size, wait_s = REQUEST.unpack(
                receive(connection, REQUEST.size)
            )
            if max(key_size, value_size) > MAX_BYTES:
                raise ConnectionError(f"a request of {max(key_size, value_size)} bytes")
            key = receive(connection, key_size).decode(errors="replace")
            value = receive(connection, value_size)
            try:
                found, done = self._perform(operation, key, value, wait_s), True
            except (RuntimeError, ValueError, OverflowError) as error:  # also: no key in time
                found, done = str(error).encode(), False
            connection.sendall(REPLY.pack(done, len(found)) + found)

    def _perform(self, operation: int, key: str, value: bytes, wait_s: float) -> bytes:
        if operation == SET:
            self._store.set(key, value)
            return b""
        if operation == ADD:
            return str(self._store.add(key, int(value))).encode()
        if operation == CHECK:
            return b"1" if self._store.check([key]) else b"0"
        if operation != GET:
            raise ValueError(f"unknown operation {operation}")
        self._store.wait([key], timedelta(seconds=min(wait_s, MAX_WAIT_S)))
        return bytes(self._store.get(key))


def meet(address: Address, token: bytes, timeout_s: float) -> Any:
    """Return the store of the meeting at `address`, for a member."""
    timeout = timedelta(seconds=timeout_s)
    if torch.cuda.is_available():
        return dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
    return MemberStore(address, token, timeout)


class MemberStore(dist.Store):  # type: ignore[misc]
    """A member's end, with the methods that gloo calls."""

    def __init__(self, address: Address, token: bytes, timeout: timedelta) -> None:
        super().__init__()
        self._timeout, self._lock = timeout, threading.Lock()
        self._connection = connect(address, token, b"", timeout.total_seconds())
        self._connection.settimeout(None)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(SET, key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._ask(GET, key)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(ADD, key, str(amount).encode()))

    def check(self, keys: list[str]) -> bool:
        return all(self._ask(CHECK, key) == b"1" for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._ask(GET, key, timeout=timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _ask(
        self, operation: int, key: str, value: bytes = b"", timeout: timedelta | None = None
    ) -> bytes:
        wait_s, name = (timeout or self._timeout).total_seconds(), key.encode()
        with self._lock:
            self._connection.sendall(
                REQUEST.pack(operation, len(name), len(value), wait_s) + name + value
            )
            done, size = REPLY.unpack(receive(self._connection, REPLY.size))
            found = receive(self._connection, size)
        if not done:
            raise RuntimeError(found.decode(errors="replace"))
        return found
