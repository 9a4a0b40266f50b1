"""Message queue and admission: freshness, drop-oldest, monotonic versions, tickets."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError, LedgerError
from paceline.queue.admission import Admission
from paceline.queue.message_queue import (
    DropReason,
    FutureVersionError,
    Item,
    MessageQueue,
    MessageQueueClient,
)
from tests.fault_report import Fault


def make(
    max_queue_size: int = 1000, max_staleness: int = 3
) -> tuple[MessageQueue, MessageQueueClient, list[tuple[Any, DropReason]]]:
    dropped: list[tuple[Any, DropReason]] = []

    def on_drop(item: Item, reason: DropReason) -> None:
        dropped.append((item.payload, reason))

    queue = MessageQueue(max_queue_size, on_drop)
    return queue, MessageQueueClient(queue, max_staleness), dropped


def test_get_samples_withholds_version_1_at_version_5_when_max_staleness_is_3() -> None:
    queue, client, dropped = make(max_staleness=3)
    assert client.put_samples("old", param_version=1)
    assert client.put_samples("fresh", param_version=2)
    assert client.get_samples(current_param_version=5) == ["fresh"]
    assert dropped == [("old", DropReason.STALE)] and queue.counts.dropped == 1


def test_get_samples_returns_none_when_all_samples_are_stale() -> None:
    _, client, _ = make(max_staleness=3)
    client.put_samples("old", param_version=1)
    assert client.get_samples(current_param_version=5) is None


def test_get_samples_returns_none_when_samples_are_missing() -> None:
    queue, client, _ = make()
    client.put_samples("a", param_version=0)
    assert client.get_samples(2, current_param_version=0) is None
    client.put_samples("b", param_version=0)
    assert client.get_samples(2, current_param_version=0) == ["a", "b"]
    assert queue.counts.taken == 2


def test_get_samples_takes_chosen_keys_when_all_are_present() -> None:
    _, client, _ = make()
    for key in (1, 2, 3):
        client.put_samples(str(key), 0, key)
    assert client.get_samples(2, current_param_version=0, keys=[3, 4]) is None
    assert client.get_samples(2, current_param_version=0, keys=[3, 1]) == ["3", "1"]


def test_get_samples_rejects_negative_count() -> None:
    with pytest.raises(ConfigError, match="count = -1: expected 0 or more"):
        make()[1].get_samples(-1, current_param_version=0)


def test_queue_drops_oldest_item_when_full() -> None:
    queue, client, dropped = make(max_queue_size=2)
    for number in range(4):
        assert queue.put(number, param_version=0)
    assert dropped == [(0, DropReason.QUEUE_FULL), (1, DropReason.QUEUE_FULL)]
    assert queue.counts.dropped == 2 and queue.utilization == 1.0
    assert client.get_samples(2, current_param_version=0) == [2, 3]


@pytest.mark.fault("E4", "group of a version that the trainer has not reached")
def test_queue_rejects_version_when_trainer_has_not_reached_it(fault: Fault) -> None:
    queue, client, dropped = make()
    queue.put("future", param_version=6)
    assert client.get_samples(current_param_version=5) is None
    assert dropped == [("future", DropReason.FUTURE)]
    fault.fired()
    queue.set_version(5)
    with pytest.raises(FutureVersionError, match=r"version 6.*reached version 5"):
        queue.put("again", param_version=6)
    with pytest.raises(FutureVersionError, match="decreased from 5 to 4"):
        queue.set_version(4)


@pytest.mark.fault("A3", "group arrives a second time")
def test_queue_accepts_key_once(fault: Fault) -> None:
    queue, _, _ = make()
    assert queue.put("a", 0, key="k") and not queue.put("a again", 0, key="k")
    assert len(queue) == 1 and queue.counts.duplicates == 1
    fault.fired()
    fault.counted(lost=0, twice=0)


@given(
    st.lists(st.tuples(st.sampled_from(["put", "get", "step"]), st.integers(0, 3)), max_size=60),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_every_item_is_taken_once_dropped_once_or_still_queued(
    actions: list[tuple[str, int]], size: int, max_staleness: int
) -> None:
    queue, _, dropped = make(size)
    version, put, taken = 0, 0, []
    for action, number in actions:
        if action == "put":
            queue.put(put, param_version=max(0, version - number))
            put += 1
        elif action == "step":
            version += number
            queue.set_version(version)
        elif (items := queue.take(number, version, max_staleness)) is not None:
            assert all(0 <= version - item.param_version <= max_staleness for item in items)
            taken += [item.payload for item in items]
        assert len(queue) <= size
    gone = taken + [payload for payload, _ in dropped]
    assert len(gone) == len(set(gone)) and len(gone) + len(queue) == put


def test_admission_rejects_group_when_no_ticket_is_free() -> None:
    admission = Admission(capacity=1)
    admission.admit(0)
    with pytest.raises(LedgerError, match="without a free ticket"):
        admission.admit(1)
    admission.take([0])
    assert admission.free == 0, "taken is not enough: the weights it is trained into must be live"
    admission.release_trained()
    assert admission.free == 1


def test_admission_waits_for_trainer_when_queue_is_smaller_than_capacity() -> None:
    admission = Admission(capacity=6, queue_size=2)
    for seq in range(2):
        admission.admit(seq)
    assert admission.free == 0
    admission.take([0])
    assert admission.free == 1
    admission.admit(2)
    admission.take([1, 2])
    assert admission.free == 2
