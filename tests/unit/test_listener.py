"""Connections of a run: clients without the token get nothing and delay no other client."""

import _thread
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import psutil
import pytest

from paceline.remote import listener
from paceline.remote.listener import NONCE, PROOF, Listener, connect, receive
from tests.fault_report import Fault

HOST, TOKEN, HELLO = "127.0.0.1", b"t" * 32, b"hello"


def echo(connection: socket.socket, message: bytes) -> None:
    connection.sendall(message * 2)


@pytest.fixture
def server() -> Iterator[Listener]:
    made = Listener(HOST, TOKEN, len(HELLO), echo)
    yield made
    made.close()


def served(server: Listener, token: bytes = TOKEN) -> bool:
    with connect((HOST, server.port), token, HELLO, 30) as connection:
        return receive(connection, 10) == HELLO * 2


def test_client_with_token_is_served_and_others_are_not(server: Listener) -> None:
    assert served(server)
    with pytest.raises(ConnectionError, match="ended early"):
        served(server, b"x" * 32)


def test_client_leaves_when_server_does_not_know_token() -> None:
    with socket.create_server((HOST, 0)) as stranger:
        stranger.settimeout(60)

        def pretend() -> None:
            connection, _ = stranger.accept()
            with connection:
                connection.sendall(bytes(NONCE))
                receive(connection, NONCE + len(HELLO) + PROOF)
                connection.sendall(bytes(PROOF))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ConnectionError, match="does not know the token"):
            connect(stranger.getsockname(), TOKEN, HELLO, 60)
        thread.join()


def test_proof_of_one_connection_is_worth_nothing_in_another(server: Listener) -> None:
    with socket.create_connection((HOST, server.port), timeout=60) as first:
        challenge, nonce = receive(first, NONCE), bytes(NONCE)
        sent = nonce + HELLO + listener._proof(TOKEN, b"client", challenge + HELLO)
    with socket.create_connection((HOST, server.port), timeout=60) as second:
        receive(second, NONCE)
        second.sendall(sent)
        with pytest.raises(ConnectionError):
            receive(second, 1)


@pytest.mark.fault("F11", "200 silent connections")
def test_silent_connections_hold_no_threads_and_few_descriptors(
    server: Listener, fault: Fault
) -> None:
    process = psutil.Process()
    threads = process.num_threads()
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection((HOST, server.port), timeout=60))
        fault.fired()
        assert served(server)
        assert len(server._strangers) <= listener.MAX_STRANGERS
        assert process.num_threads() <= threads + 1


@pytest.mark.fault("F11", "no file descriptors left in a server")
def test_server_accepts_again_after_descriptors_ran_out(
    server: Listener, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used: list[int] = []
    client = socket.socket()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 20, before[1]))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                used.append(os.dup(0))
        client.connect((HOST, server.port))
        deadline = time.monotonic() + 60
        while "was not accepted" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in used:
            os.close(descriptor)
        client.close()
    assert "Too many open files" in caplog.text
    fault.fired()
    assert served(server)
    fault.recovered()


@pytest.mark.fault("B6", "stranger sends a byte now and then")
def test_slow_or_silent_stranger_is_dropped_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch, server: Listener, fault: Fault
) -> None:
    monkeypatch.setattr(listener, "PROOF_TIMEOUT_S", 0.3)
    with socket.create_connection((HOST, server.port), timeout=60) as slow:
        receive(slow, NONCE)
        fault.fired()
        slow.settimeout(0.2)
        with pytest.raises(OSError):
            for _ in range(NONCE + len(HELLO) + PROOF - 1):  # one byte short of a whole message
                slow.sendall(b"x")
                with suppress(TimeoutError):
                    if not slow.recv(1):
                        raise ConnectionError
        fault.detected()


@pytest.mark.fault("G4", "1000 connections send random bytes")
def test_random_bytes_are_rejected_without_error(server: Listener, fault: Fault) -> None:
    generator = random.Random(0)
    for _ in range(1000):
        with (
            socket.create_connection((HOST, server.port), timeout=60) as connection,
            suppress(OSError),  # it was refused before it sent everything
        ):
            connection.sendall(generator.randbytes(generator.randrange(1, 200)))
    fault.fired()
    assert served(server)


def test_listener_serves_again_after_thread_could_not_be_started(
    server: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        for module in (_thread, threading):
            for name in ("start_new_thread", "_start_new_thread"):
                patch.setattr(module, name, refuse, raising=False)
        with pytest.raises(OSError):
            served(server)
    assert served(server)


def test_listener_serves_again_after_memory_was_full(
    server: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(listener.secrets, "token_bytes", fail)
        with (
            socket.create_connection((HOST, server.port), timeout=60) as connection,
            pytest.raises(ConnectionError),
        ):
            receive(connection, NONCE)
    assert served(server)
