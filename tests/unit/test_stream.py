"""Weights over TCP: whole or not at all, from whoever has them, to whoever asks."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from paceline.errors import SyncError
from paceline.sync import stream
from paceline.sync.block import PIECE, Layout, layout_of
from paceline.sync.stream import REQUEST, StreamReceiver, StreamSource
from paceline.sync.weights import Weights

HOST, TOKEN = "127.0.0.1", b"t" * 32
SHAPES = {
    "a": (1 << 20,),
    "b": (3, 5),
    "c": (1 << 20, 3),
    "d": (),
}  # 16 MB: some tensors within a piece, one over several


def tensors(seed: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


LAYOUT: Layout = layout_of(tensors(0))


def source() -> StreamSource:
    return StreamSource(LAYOUT, HOST, TOKEN)


def receiver(*ports: int) -> StreamReceiver:
    made = StreamReceiver(LAYOUT, HOST, TOKEN)
    made.sources = [(HOST, port) for port in ports]
    return made


def wait(for_what: Callable[[], bool]) -> None:
    condition = threading.Condition()
    with condition:
        while not for_what():
            condition.wait(0.001)


def received(by: StreamReceiver, weights: Weights) -> dict[str, Tensor]:
    by.fetch(weights.version)
    wait(lambda: by.done(weights.version))
    return by.tensors(weights)


def same(found: dict[str, Tensor], seed: int) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in tensors(seed))


def test_engines_get_every_bit_from_the_trainer_or_from_each_other() -> None:
    trainer = source()
    first = receiver(trainer.server.port)
    second = receiver(first.server.port)  # only the first can give it to this one
    for version in (1, 2):
        for engine in (second, first):
            engine.fetch(version)  # before it is there
        weights = Weights(version, trainer.write(tensors(version), version))
        assert same(received(first, weights), version) and same(received(second, weights), version)


def test_bytes_travel_while_the_trainer_still_gathers() -> None:
    trainer = source()
    engine = receiver(trainer.server.port)

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors(1):
            if name == "d":
                wait(lambda: engine.buffer.filled >= 3 * PIECE)
            yield name, tensor

    engine.fetch(1)
    assert same(received(engine, Weights(1, trainer.write(gathered(), 1))), 1)


def test_an_engine_whose_source_ends_or_is_silent_goes_on_with_the_trainer_from_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "SILENCE_S", 0.2)
    trainer = source()
    weights = Weights(1, trainer.write(tensors(1), 1))
    asked: list[int] = []
    original = stream.StreamServer._send
    monkeypatch.setattr(
        stream.StreamServer,
        "_send",
        lambda self, c, v, at: (asked.append(at), original(self, c, v, at)),
    )
    with socket.create_server((HOST, 0)) as half, socket.create_server((HOST, 0)) as mute:

        def give_a_piece() -> None:
            connection, _ = half.accept()
            with connection:
                connection.recv(REQUEST.size)
                connection.sendall(trainer._buffer.block.view[:PIECE])

        giver = threading.Thread(target=give_a_piece)
        giver.start()
        engine = receiver(half.getsockname()[1], mute.getsockname()[1], trainer.server.port)
        assert same(received(engine, weights), 1)
        giver.join()
    assert asked == [PIECE]


def test_what_arrives_damaged_or_incomplete_is_refused_and_can_be_fetched_again() -> None:
    trainer = source()
    engine = receiver(trainer.server.port)
    checksum = trainer.write(tensors(1), 1)
    trainer._buffer.block.bytes[5] ^= 1
    with pytest.raises(SyncError, match="version 1 arrived damaged"):
        received(engine, Weights(1, checksum))
    trainer._buffer.block.bytes[5] ^= 1
    assert same(received(engine, Weights(1, checksum)), 1)
    with pytest.raises(SyncError, match=r"did not export \['d'\]"):
        trainer.write(tensors(2)[:3], 2)
    with pytest.raises(SyncError, match="exported b where a was expected"):
        trainer.write(tensors(2)[1:], 2)


def test_a_version_that_is_gone_or_a_wrong_token_gives_nothing() -> None:
    trainer = source()
    weights = Weights(1, trainer.write(tensors(1), 1))
    stranger = StreamReceiver(LAYOUT, HOST, b"x" * 32)
    stranger.sources = [(HOST, trainer.server.port)]
    trainer.write(tensors(2), 2)
    for engine in (stranger, receiver(trainer.server.port)):
        with pytest.raises(SyncError, match=r"could not be fetched.*ended after 0 of"):
            received(engine, weights)


def test_a_slow_reader_keeps_the_old_version_and_a_new_one_overtakes_it() -> None:
    trainer = source()
    old = Weights(1, trainer.write(tensors(1), 1))
    with socket.create_connection((HOST, trainer.server.port)) as slow:
        slow.sendall(REQUEST.pack(TOKEN, 1, 0))
        wait(lambda: trainer._buffer.readers == 1)
        new = Weights(2, trainer.write(tensors(2), 2))
        engine = receiver(trainer.server.port)
        assert same(received(engine, new), 2)
        kept = bytearray()
        while part := slow.recv(1 << 20):
            kept += part
    reader = receiver()
    reader.buffer.begin(1)
    reader.buffer.block.view[:] = kept
    while not reader.buffer.done:
        reader.buffer.advance()
    assert same(reader.tensors(old), 1)
    with pytest.raises(SyncError, match="overtaken by version 2"):
        engine.tensors(old)
