"""Weight transfer over TCP: complete or not at all, from the trainer or from another engine."""

import asyncio
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from paceline.errors import SyncError
from paceline.remote.listener import Address, Listener, connect
from paceline.sync import stream
from paceline.sync.block import CHUNK, Layout, layout_of
from paceline.sync.stream import REQUEST, Stream, StreamSource, StreamTarget
from paceline.sync.weights import Weights
from tests.fault_report import Fault

HOST, TOKEN = "127.0.0.1", b"t" * 32
# 16 MB: some tensors are inside one chunk, one spans several.
SHAPES = {"a": (1 << 20,), "b": (3, 5), "c": (1 << 20, 3), "d": ()}


def tensors(seed: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


LAYOUT: Layout = layout_of(tensors(0))


def source() -> StreamSource:
    return StreamSource(LAYOUT, HOST, TOKEN)


def target(*ports: int, token: bytes = TOKEN) -> StreamTarget:
    made = StreamTarget(LAYOUT, HOST, token)
    made.set_sources([(HOST, port) for port in ports])
    return made


def wait_until(true: Callable[[], bool]) -> None:
    condition = threading.Condition()
    with condition:
        while not true():
            condition.wait(0.001)


def received(by: StreamTarget, weights: Weights) -> dict[str, Tensor]:
    by.fetch(weights.version)
    wait_until(lambda: by.done(weights.version))
    return by.tensors(weights)


def same(found: dict[str, Tensor], seed: int) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in tensors(seed))


def test_engine_gets_weights_bit_for_bit_from_trainer_or_other_engine() -> None:
    trainer = source()
    first = target(trainer.address)
    second = target(first.address)  # has no other source
    for version in (1, 2):
        for engine in (second, first):
            engine.fetch(version)  # before it is published
        weights = Weights(version, trainer.write(tensors(version), version))
        assert same(received(first, weights), version) and same(received(second, weights), version)


def test_engine_receives_bytes_while_trainer_gathers() -> None:
    trainer = source()
    engine = target(trainer.address)

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors(1):
            if name == "d":
                wait_until(lambda: engine.buffer.filled >= 3 * CHUNK)
            yield name, tensor

    engine.fetch(1)
    assert same(received(engine, Weights(1, trainer.write(gathered(), 1))), 1)


@pytest.mark.fault("E2", "sender of weights ends after one chunk, the next one is silent")
def test_engine_continues_from_trainer_when_source_ends_or_is_unresponsive(
    monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr(stream, "SILENCE_S", 1.0)
    trainer = source()
    weights = Weights(1, trainer.write(tensors(1), 1))
    starts: list[int] = []
    original = stream.StreamServer._send
    monkeypatch.setattr(
        stream.StreamServer,
        "_send",
        lambda self, c, v, at: (starts.append(at), original(self, c, v, at)),
    )

    def send_one_chunk(connection: socket.socket, request: bytes) -> None:
        connection.sendall(trainer._buffer.block.view[:CHUNK])

    partial = Listener(HOST, TOKEN, REQUEST.size, send_one_chunk)
    with socket.create_server((HOST, 0)) as mute:
        engine = target(partial.port, mute.getsockname()[1], trainer.address)
        assert same(received(engine, weights), 1)
    partial.close()
    assert starts == [CHUNK]
    fault.fired()


def test_engine_asks_trainer_at_once_when_its_source_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "SILENCE_S", 60.0)
    trainer = source()
    weights = Weights(1, trainer.write(tensors(1), 1))
    cut = threading.Event()
    server = Listener(HOST, TOKEN, REQUEST.size, lambda *_: bool(cut.wait(60)))
    first = target(server.port)
    second = target(first.address, trainer.address)
    begun = time.monotonic()
    first.fetch(1)
    second.fetch(1)
    wait_until(lambda: first.buffer.readers == 1)  # the second one waits for the first
    cut.set()
    assert same(received(second, weights), 1)
    assert time.monotonic() - begun < 30 and first.buffer.failure
    server.close()


def test_new_version_is_fetched_when_previous_transfer_has_not_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = source()
    old = Weights(1, trainer.write(tensors(1), 1))
    engine = target(trainer.address)
    complete, announced = threading.Event(), threading.Event()
    original = stream.WeightBuffer.advance

    def advance(buffer: stream.WeightBuffer) -> None:
        original(buffer)
        if buffer is first and buffer.filled == buffer.size and not complete.is_set():
            complete.set()
            announced.wait(60)

    first = engine.buffer
    monkeypatch.setattr(stream.WeightBuffer, "advance", advance)
    engine.fetch(old.version)
    late = engine._thread
    assert complete.wait(60)
    engine.fetch(2)  # while the thread of version 1 has yet to see that it is complete
    announced.set()
    late.join()
    assert engine.buffer.failure is None and engine.buffer.filled == 0
    weights = Weights(2, trainer.write(tensors(2), 2))
    assert same(received(engine, weights), 2)


@pytest.mark.fault("E2", "streamed weights corrupted")
def test_engine_fetches_again_when_weights_are_corrupted(fault: Fault) -> None:
    trainer = source()
    engine = target(trainer.address)
    checksum = trainer.write(tensors(1), 1)
    trainer._buffer.block.bytes[5] ^= 1
    with pytest.raises(SyncError, match="version 1 are corrupted"):
        received(engine, Weights(1, checksum))
    fault.fired()
    trainer._buffer.block.bytes[5] ^= 1
    assert same(received(engine, Weights(1, checksum)), 1)
    fault.recovered()


def test_engine_fetches_again_when_receiving_fails_for_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = source()
    weights = Weights(1, trainer.write(tensors(1), 1))
    engine = target(trainer.address)

    def advance(buffer: stream.WeightBuffer) -> None:
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(stream.WeightBuffer, "advance", advance)
        engine.fetch(1)
        engine._thread.join()
    assert engine.done(1)
    with pytest.raises(SyncError, match=r"could not be fetched: .*planted"):
        engine.tensors(weights)
    assert same(received(engine, weights), 1)


def test_write_fails_when_tensors_are_missing_or_out_of_order() -> None:
    trainer = source()
    with pytest.raises(SyncError, match=r"did not export \['d'\]"):
        trainer.write(tensors(2)[:3], 2)
    with pytest.raises(SyncError, match="exported b where a was expected"):
        trainer.write(tensors(2)[1:], 2)


def test_fetch_fails_when_version_is_gone_or_token_is_wrong() -> None:
    trainer = source()
    weights = Weights(1, trainer.write(tensors(1), 1))
    stranger = target(trainer.address, token=b"x" * 32)
    trainer.write(tensors(2), 2)
    for engine in (stranger, target(trainer.address)):
        with pytest.raises(SyncError, match=r"could not be fetched.*ended (early|after 0 of)"):
            received(engine, weights)


@pytest.mark.fault("E2", "engine reads slowly while the next version is published")
def test_slow_reader_gets_old_version_while_new_one_is_published(fault: Fault) -> None:
    trainer = source()
    old = Weights(1, trainer.write(tensors(1), 1))
    with connect((HOST, trainer.address), TOKEN, REQUEST.pack(1, 0), 60) as slow:
        wait_until(lambda: trainer._buffer.readers == 1)
        fault.fired()
        new = Weights(2, trainer.write(tensors(2), 2))
        engine = target(trainer.address)
        assert same(received(engine, new), 2)
        kept = bytearray()
        while part := slow.recv(1 << 20):
            kept += part
    reader = target()
    reader.buffer.begin(1)
    reader.buffer.block.view[:] = kept
    while not reader.buffer.done:
        reader.buffer.advance()
    assert same(reader.tensors(old), 1)
    with pytest.raises(SyncError, match="version 1 was replaced by version 2"):
        engine.tensors(old)


@pytest.mark.fault("F11", "1000 silent connections to the sender of weights")
def test_engine_gets_weights_while_1000_silent_connections_are_open(fault: Fault) -> None:
    trainer = source()
    weights = Weights(1, trainer.write(tensors(1), 1))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with ExitStack() as stack:
            # They share the process with the server, which has 150 descriptors for itself.
            free = psutil.Process().num_fds() + 1150
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, max(free, limits[1])))
            for _ in range(1000):
                stack.enter_context(socket.create_connection((HOST, trainer.address), timeout=60))
            fault.fired()
            assert same(received(target(trainer.address), weights), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class StubWorker:
    """A worker that records where its target fetches from."""

    host = HOST

    def __init__(self, port: int) -> None:
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sources: list[Address] = []
        self._port = port

    async def call(self, part: str, method: str, *args: Any) -> int:
        if method == "run":
            self.sources = args[1]
        return self._port


def test_engine_that_recovers_does_not_fetch_from_engines_that_fetch_from_it() -> None:
    async def scenario() -> tuple[list[Address], list[Address]]:
        trainer, first, second = (StubWorker(port) for port in (1, 2, 3))
        made = Stream(trainer, LAYOUT, TOKEN, (HOST, 1))  # type: ignore[arg-type]
        for engine in (first, second, first):
            await made.attach(engine)  # type: ignore[arg-type]
        return first.sources, second.sources

    assert asyncio.run(scenario()) == ([(HOST, 1)], [(HOST, 2), (HOST, 1)])
