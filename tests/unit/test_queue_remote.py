"""The queue between processes: groups arrive as they were, a key counts once, what a dead taker held comes back, and a producer that
was replaced is refused."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError, PacelineError, WorkerDied
from paceline.queue import remote
from paceline.queue.message_queue import FencedError, FutureVersionError, MessageQueue, Producer
from paceline.queue.remote import QueueServer, RemoteQueueClient
from paceline.queue.wire import WireError, decode, encode
from paceline.types import Completion, Finish, Group, Prompt, Trajectory, Turn

TOKEN = "a token"


def completion(length: int, seed: int = 0, finish: Finish = Finish.STOP) -> Completion:
    rng = np.random.default_rng(seed)
    logprobs = -rng.random(length, np.float32)
    return Completion(
        rng.integers(0, 1000, length, np.int32), logprobs, np.full(length, seed, np.int32), finish
    )


def group(seq: int = 0, attempts: int = 2, length: int = 5) -> Group:
    trajectories = tuple(
        Trajectory((Turn((1, 2), completion(length, i)),), f"answer {i}", float(i), {"detail": 0.5})
        for i in range(attempts)
    )
    return Group(
        seq, Prompt(f"p{seq}", (1, 2), "ask", {"answer": ["a", 1]}), trajectories, 1.5, 2.5
    )


def same(one: Group, other: Group) -> bool:
    def plain(group: Group) -> Any:
        def turns(trajectory: Trajectory) -> Any:
            return [
                (
                    turn.prompt,
                    turn.reward,
                    c.tokens.tolist(),
                    c.logprobs.tobytes(),
                    c.versions.tolist(),
                    c.finish,
                )
                for turn in trajectory.turns
                for c in [turn.completion]
            ]

        attempts = [(turns(t), t.text, t.reward, dict(t.details)) for t in group.trajectories]
        return group.seq, group.prompt, attempts, group.started_s, group.finished_s, group.baseline

    return bool(plain(one) == plain(other))


turns = st.builds(
    Turn,
    st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple),
    st.builds(completion, st.integers(0, 6), st.integers(0, 9), st.sampled_from(Finish)),
    st.floats(allow_nan=False),
)
trajectories = st.builds(
    Trajectory,
    st.lists(turns, max_size=3).map(tuple),
    st.text(),
    st.none() | st.floats(allow_nan=False),
    st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=2),
)
prompts = st.builds(
    Prompt,
    st.text(),
    st.lists(st.integers(0, 99)).map(tuple),
    st.text(),
    st.dictionaries(st.text(), st.text() | st.integers()),
)
groups = st.builds(
    Group,
    st.integers(0, 2**40),
    prompts,
    st.lists(trajectories, max_size=3).map(tuple),
    st.floats(allow_nan=False),
    st.floats(allow_nan=False),
    st.none() | st.floats(allow_nan=False),
)


@given(groups)
@settings(max_examples=200, deadline=None)
def test_what_is_decoded_is_what_was_encoded_bit_for_bit(original: Group) -> None:
    assert same(decode(encode(original)), original)


def test_decoded_arrays_are_views_into_the_bytes_that_arrived() -> None:
    arrived = encode(group())
    tokens = decode(arrived).trajectories[1].turns[0].completion.tokens
    assert not tokens.flags.owndata and np.shares_memory(tokens, np.frombuffer(arrived, np.uint8))


@pytest.mark.parametrize(
    "damage", [b"", b"abc", b"\xff" * 64, encode(group())[:-20], encode(group())[:30]]
)
def test_bytes_that_are_not_a_group_are_refused(damage: bytes) -> None:
    with pytest.raises(WireError, match="not a group"):
        decode(damage)


def test_a_row_that_cannot_travel_is_named() -> None:
    with pytest.raises(WireError, match=r"row of prompt p0 cannot travel.*set"):
        encode(replace(group(), prompt=Prompt("p0", (1,), "", {"answer": {1, 2}})))


Scenario = Callable[[QueueServer, Callable[..., Awaitable[RemoteQueueClient]]], Awaitable[None]]


def serve(tmp_path: Path, scenario: Scenario, address: str = "", **queue: Any) -> MessageQueue:
    async def run() -> MessageQueue:
        server = await QueueServer.open(
            MessageQueue(**queue), address or f"unix:{tmp_path}/queue", TOKEN
        )
        clients: list[RemoteQueueClient] = []

        async def connect(*args: Any) -> RemoteQueueClient:
            clients.append(await RemoteQueueClient.connect(server.address, TOKEN, *args))
            return clients[-1]

        try:
            async with asyncio.timeout(20):
                await scenario(server, connect)
        finally:
            for client in clients:
                await client.close()
            await server.close()
        return server.queue

    return asyncio.run(run())


@pytest.mark.parametrize("address", ["", "tcp://127.0.0.1:0"])
def test_several_producers_and_takers_share_one_queue_and_every_group_is_taken_once(
    address: str, tmp_path: Path
) -> None:
    async def scenario(server: QueueServer, connect: Any) -> None:
        producers = [await connect(Producer(f"rollout-{number}")) for number in range(2)]
        takers = [await connect() for _ in range(2)]
        putting = [producers[seq % 2].put_samples(group(seq), param_version=0) for seq in range(20)]
        taking = [
            taker.get_samples(5, current_param_version=0, timeout_s=10) for taker in takers * 2
        ]
        put, *taken = await asyncio.gather(asyncio.gather(*putting), *taking)
        assert put == [True] * 20
        assert sorted(found.seq for batch in taken for found in batch) == list(range(20))
        assert all(same(found, group(found.seq)) for batch in taken for found in batch)

    queue = serve(tmp_path, scenario, address)
    assert queue.counts.put == queue.counts.taken == 20


def test_a_key_counts_once_also_after_it_was_taken(tmp_path: Path) -> None:
    async def scenario(server: QueueServer, connect: Any) -> None:
        producer, taker = await connect(), await connect()
        assert await producer.put_samples(group(7), 0) and not await producer.put_samples(
            group(7), 0
        )
        await taker.get_samples(current_param_version=0)
        await taker.acknowledge()
        assert not await producer.put_samples(group(7), 0)

    assert serve(tmp_path, scenario).counts.duplicates_refused == 2


def test_what_a_dead_taker_has_not_acknowledged_comes_back_first(tmp_path: Path) -> None:
    async def scenario(server: QueueServer, connect: Any) -> None:
        producer, doomed, taker = await connect(), await connect(), await connect()
        for seq in range(4):
            await producer.put_samples(group(seq), 0)
        assert [found.seq for found in await doomed.get_samples(1, current_param_version=0)] == [0]
        await doomed.acknowledge()
        assert [found.seq for found in await doomed.get_samples(2, current_param_version=0)] == [
            1,
            2,
        ]
        await doomed.close()
        assert [found.seq for found in await taker.get_samples(3, current_param_version=0)] == [
            1,
            2,
            3,
        ]

    queue = serve(tmp_path, scenario)
    assert (queue.counts.taken, queue.counts.returned) == (
        6,
        2 + 3,
    )  # the last taker did not acknowledge either


def test_what_comes_for_a_taker_that_no_longer_waits_goes_back(tmp_path: Path) -> None:
    async def scenario(server: QueueServer, connect: Any) -> None:
        producer, taker = await connect(), await connect()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(taker.get_samples(current_param_version=0), 0.05)
        assert await producer.put_samples(group(0), 0)
        assert [
            found.seq for found in await taker.get_samples(current_param_version=0, timeout_s=5)
        ] == [0]

    assert (
        serve(tmp_path, scenario).counts.returned == 2
    )  # the second time because the taker left without a word


def test_a_producer_that_was_replaced_is_refused_and_counted(tmp_path: Path) -> None:
    async def scenario(server: QueueServer, connect: Any) -> None:
        zombie = await connect(Producer("rollout", 1))
        assert await zombie.put_samples(group(0), 0)
        successor = await connect(Producer("rollout", 2))
        with pytest.raises(
            FencedError, match="incarnation 1 of 'rollout' has been replaced: sample 1 is refused"
        ):
            await zombie.put_samples(group(1), 0)
        assert await successor.put_samples(group(1), 0)

    queue = serve(tmp_path, scenario)
    assert queue.counts.fenced_refused == 1 and queue.counts.put == 2


def test_a_full_queue_holds_its_producers_back_by_items_and_by_bytes_or_drops_its_oldest(
    tmp_path: Path,
) -> None:
    size = len(encode(group()))
    for limits in ({"max_queue_size": 2}, {"max_queue_bytes": 2 * size}):

        async def scenario(server: QueueServer, connect: Any) -> None:
            producer, taker = await connect(), await connect()
            putting = [
                asyncio.ensure_future(producer.put_samples(group(seq), 0, wait=True))
                for seq in range(6)
            ]
            done, _ = await asyncio.wait(putting, timeout=0.2)
            assert len(done) == 2 == len(server.queue)
            for _ in range(3):
                await taker.get_samples(2, current_param_version=0)
            assert all(await asyncio.gather(*putting))

        queue = serve(tmp_path, scenario, **limits)
        assert queue.counts.dropped_full == 0 and queue.counts.put == 6
    dropping = MessageQueue(max_queue_bytes=2 * size)
    for seq in range(6):
        dropping.put(encode(group(seq)), 0, seq, size)
    assert dropping.counts.dropped_full == 4 and dropping.bytes == 2 * size


def test_errors_cross_the_wire_as_what_they_are(tmp_path: Path) -> None:
    async def scenario(server: QueueServer, connect: Any) -> None:
        server.queue.set_version(3)
        client = await connect()
        with pytest.raises(FutureVersionError, match="says version 4"):
            await client.put_samples(group(), param_version=4)
        with pytest.raises(TimeoutError):
            await client.get_samples(current_param_version=3, timeout_s=0.05)
        with pytest.raises(ConfigError, match="the token is another one"):
            await RemoteQueueClient.connect(server.address, "a guess")
        with pytest.raises(ConfigError, match="not the address of a queue"):
            await RemoteQueueClient.connect("queue", TOKEN)
        await server.close()
        with pytest.raises(WorkerDied, match="is gone"):
            await client.put_samples(group(), param_version=3)

    serve(tmp_path, scenario)


def test_who_does_not_speak_the_language_is_shown_out_and_nobody_else_notices(
    tmp_path: Path,
) -> None:
    async def scenario(server: QueueServer, connect: Any) -> None:
        client = await connect()
        nested = b"[" * 4000
        for noise in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 100,
            b"\x02" + bytes(11) + b"[]",
            len(nested).to_bytes(4, "little") + bytes(8) + nested,
        ):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "queue")
            writer.write(noise)
            assert await reader.read() == b""
            writer.close()
        assert await client.put_samples(group(), 0)

    serve(tmp_path, scenario)
    assert not (tmp_path / "queue").exists()


def test_who_leaves_in_the_middle_of_a_message_or_does_not_read_its_answers_harms_nobody(
    tmp_path: Path,
) -> None:
    def message(header: dict[str, Any], body: bytes = b"") -> bytes:
        head = json.dumps(header).encode()
        return len(head).to_bytes(4, "little") + len(body).to_bytes(8, "little") + head + body

    async def scenario(server: QueueServer, connect: Any) -> None:
        client = await connect()
        hello = message({"token": TOKEN, "producer": None})
        put = message(
            {"id": 1, "action": "put", "version": 0, "key": "half", "wait": False}, encode(group())
        )
        for cut in (3, 20, len(put) - 1):
            _, writer = await asyncio.open_unix_connection(tmp_path / "queue")
            writer.write(hello + put[:cut])
            await writer.drain()
            writer.close()
        _, deaf = await asyncio.open_unix_connection(tmp_path / "queue", limit=1024)
        deaf.write(hello)
        asked = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(
                0.5
            ):  # an error as long as its question, again and again, and none is read
                while asked < 200:
                    asked += 1
                    deaf.write(
                        message({"id": "x" * 100_000, "action": "get", "count": -1, "version": 0})
                    )
                    await deaf.drain()
        assert asked < 200, "its questions are not read any more"
        assert await client.put_samples(group(1), 0)
        deaf.close()

    queue = serve(tmp_path, scenario)
    assert queue.counts.put == 1, "no half message came in"


def test_a_client_that_finds_nobody_or_somebody_else_is_told_and_one_that_is_closed_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "HANDSHAKE_TIMEOUT_S", 0.3)

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async def scenario(server: QueueServer, connect: Any) -> None:
        for address in ("unix:/no/such/socket", "tcp://127.0.0.1:1"):
            with pytest.raises(WorkerDied, match=f"nobody serves a message queue at {address}"):
                await RemoteQueueClient.connect(address, TOKEN)
        with pytest.raises(ConfigError, match="write unix:/path or tcp://host:port"):
            await RemoteQueueClient.connect("tcp://127.0.0.1", TOKEN)
        other = await asyncio.start_server(impostor, "127.0.0.1", 0)
        silent = await asyncio.start_server(lambda *_: asyncio.sleep(30), "127.0.0.1", 0)
        for found in (other, silent):
            with pytest.raises(ConfigError, match="is none: it does not speak our language"):
                await RemoteQueueClient.connect(
                    f"tcp://127.0.0.1:{found.sockets[0].getsockname()[1]}", TOKEN
                )
            found.close()
        client = await connect()
        with pytest.raises(PacelineError, match="so many samples cannot be taken"):
            await client.get_samples(-1, current_param_version=0)
        waiting = asyncio.ensure_future(client.get_samples(current_param_version=0))
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(WorkerDied, match="is gone"):
            await waiting

    serve(tmp_path, scenario)


def test_a_producer_in_another_process_that_is_killed_leaves_whole_groups_only(
    tmp_path: Path,
) -> None:
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from paceline.queue.message_queue import Producer
from paceline.queue.remote import RemoteQueueClient
from tests.unit.test_queue_remote import group

async def main():
    client = await RemoteQueueClient.connect("unix:{tmp_path}/queue", {TOKEN!r}, Producer("rollout"))
    for seq in range(10_000):
        await client.put_samples(group(seq, attempts=8, length=512), 0, wait=True)

asyncio.run(main())
"""

    async def scenario(server: QueueServer, connect: Any) -> None:
        taker = await connect()
        process = subprocess.Popen([sys.executable, "-c", program])
        try:
            taken = await taker.get_samples(20, current_param_version=0)
        finally:
            process.kill()
            process.wait()
        rest = len(server.queue)
        taken += await taker.get_samples(rest, current_param_version=0) if rest else []
        assert [found.seq for found in taken] == list(range(len(taken)))
        assert all(same(found, group(found.seq, attempts=8, length=512)) for found in taken)

    serve(tmp_path, scenario, max_queue_size=50)
