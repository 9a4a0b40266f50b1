"""The message queue: freshness exactly as promised, drop-oldest when full, versions that only make sense forwards."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import LedgerError
from paceline.queue.admission import Admission
from paceline.queue.message_queue import (
    DropReason,
    FutureVersionError,
    Item,
    MessageQueue,
    MessageQueueClient,
)
from tests.virtual import run_virtual


def make(**settings: Any) -> tuple[MessageQueue, MessageQueueClient, list[tuple[Any, DropReason]]]:
    dropped: list[tuple[Any, DropReason]] = []

    def on_drop(item: Item, reason: DropReason) -> None:
        dropped.append((item.payload, reason))

    queue = MessageQueue(**settings, on_drop=on_drop)
    return queue, MessageQueueClient(queue), dropped


def test_a_sample_made_at_version_1_is_not_handed_out_at_version_5_when_max_staleness_is_3() -> (
    None
):
    queue, client, dropped = make(max_staleness=3)

    async def scenario() -> list[Any]:
        assert await client.put_samples("old", param_version=1)
        assert await client.put_samples("fresh", param_version=2)
        return await client.get_samples(current_param_version=5)

    assert run_virtual(scenario()) == ["fresh"]
    assert dropped == [("old", DropReason.STALE)] and queue.counts.dropped_stale == 1


def test_get_samples_waits_until_there_are_enough_and_times_out_when_there_never_are() -> None:
    _, client, _ = make()

    async def scenario() -> None:
        async def late() -> None:
            await asyncio.sleep(5)
            await client.put_samples("b", param_version=0)

        await client.put_samples("a", param_version=0)
        task = asyncio.create_task(late())
        assert await client.get_samples(2, current_param_version=0, timeout_s=10) == ["a", "b"]
        await task
        with pytest.raises(TimeoutError):
            await client.get_samples(1, current_param_version=0, timeout_s=10)

    run_virtual(scenario())


def test_a_full_queue_drops_its_oldest_and_counts_it() -> None:
    queue, _, dropped = make(max_queue_size=2)
    for number in range(4):
        assert queue.put(number, param_version=0)
    assert dropped == [(0, DropReason.QUEUE_FULL), (1, DropReason.QUEUE_FULL)]
    assert queue.counts.dropped_full == 2 and queue.utilization == 1.0
    items = queue.get(2, current_param_version=0)
    assert items and [item.payload for item in items] == [2, 3]


def test_a_version_from_the_future_is_refused() -> None:
    queue, _, dropped = make()
    queue.put("future", param_version=6)
    assert queue.get(1, current_param_version=5) is None
    assert dropped == [("future", DropReason.FUTURE)]
    queue.set_version(5)
    with pytest.raises(FutureVersionError, match=r"version 6.*reached version 5"):
        queue.put("again", param_version=6)
    with pytest.raises(FutureVersionError, match="went back from 5 to 4"):
        queue.set_version(4)


def test_the_same_key_is_taken_once() -> None:
    queue, _, _ = make()
    assert queue.put("a", 0, key="k") and not queue.put("a again", 0, key="k")
    assert len(queue) == 1 and queue.counts.duplicates_refused == 1


@given(
    st.lists(st.tuples(st.sampled_from(["put", "get", "step"]), st.integers(0, 3)), max_size=60),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_whatever_happens_every_item_is_taken_once_dropped_once_or_still_there(
    actions: list[tuple[str, int]], size: int, max_staleness: int
) -> None:
    queue, _, dropped = make(max_queue_size=size, max_staleness=max_staleness)
    version, put, taken = 0, 0, []
    for action, number in actions:
        if action == "put":
            queue.put(put, param_version=max(0, version - number))
            put += 1
        elif action == "step":
            version += number
            queue.set_version(version)
        elif (items := queue.get(number, version)) is not None:
            assert all(0 <= version - item.param_version <= max_staleness for item in items)
            taken += [item.payload for item in items]
        assert len(queue) <= size
    gone = taken + [payload for payload, _ in dropped]
    assert len(gone) == len(set(gone)) and len(gone) + len(queue) == put


def test_admission_refuses_a_group_without_a_free_ticket() -> None:
    admission = Admission(capacity=1)
    admission.admit(0)
    with pytest.raises(LedgerError, match="without a free ticket"):
        admission.admit(1)
    admission.take([0])
    assert admission.free == 0, "taken is not enough: the weights it is trained into must be live"
    admission.release_trained()
    assert admission.free == 1


def test_a_queue_smaller_than_what_may_be_under_way_holds_admission_back_until_the_trainer_takes() -> (
    None
):
    admission = Admission(capacity=6, queue_size=2)
    for seq in range(2):
        admission.admit(seq)
    assert admission.free == 0
    admission.take([0])
    assert admission.free == 1
    admission.admit(2)
    admission.take([1, 2])
    assert admission.free == 2
