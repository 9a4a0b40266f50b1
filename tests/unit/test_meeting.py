"""The meeting of a broadcast group: members find each other, and other clients are rejected."""

import random
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from paceline.remote.group import use_interface
from paceline.remote.listener import connect
from paceline.sync.meeting import GET, MAX_BYTES, REQUEST, Meeting, MemberStore, meet

dist: Any = torch.distributed
HOST, TOKEN = "127.0.0.1", b"t" * 32
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL uses torch's store")


def test_members_form_group_and_broadcast() -> None:
    meeting = Meeting(HOST, TOKEN)
    use_interface(HOST)

    def member(rank: int) -> torch.Tensor:
        store = meet(meeting.address, TOKEN, 60)
        prefix = dist.PrefixStore("a group", store)
        group = dist.ProcessGroupGloo(prefix, rank, 3, timedelta(seconds=60))
        tensor, options = torch.full((2,), float(rank)), dist.BroadcastOptions()
        options.rootRank = 2
        group.broadcast([tensor], options).wait()
        return tensor

    with ThreadPoolExecutor(3) as threads:
        assert [tensor.tolist() for tensor in threads.map(member, range(3))] == [[2.0, 2.0]] * 3


def test_store_sets_waits_and_counts() -> None:
    store = MemberStore(Meeting(HOST, TOKEN).address, TOKEN, timedelta(seconds=60))
    store.set("a", b"\x00\xff")
    assert store.get("a") == b"\x00\xff" and store.check(["a"]) and not store.check(["b"])
    assert [store.add("n", 2), store.add("n", -1)] == [2, 1]
    with pytest.raises(RuntimeError):
        store.wait(["b"], timedelta(milliseconds=1))
    store.wait(["a"], timedelta(seconds=60))


def test_client_with_wrong_token_is_rejected() -> None:
    with pytest.raises(ConnectionError):
        MemberStore(Meeting(HOST, TOKEN).address, b"x" * 32, timedelta(seconds=60))


def test_damaged_requests_end_only_their_connection() -> None:
    meeting, generator = Meeting(HOST, TOKEN), random.Random(0)
    for number in range(60):
        damaged = generator.randbytes(generator.randrange(1, 40))
        if number % 3 == 0:
            damaged = REQUEST.pack(number, 2, 0, 1e308) + b"\xff\xfe"
        if number == 1:
            damaged = REQUEST.pack(GET, MAX_BYTES + 1, 0, 1.0)
        with connect(meeting.address, TOKEN, b"", 60) as connection:
            connection.sendall(damaged)
    store = MemberStore(meeting.address, TOKEN, timedelta(seconds=60))
    store.set("a", "1")
    assert store.get("a") == b"1"
