"""The belt between rollouters and trainer: bounded, versioned, drop-oldest.

Admission already keeps samples fresh; the rules here are the second line of defence, and each use of one is counted:
a full queue drops its oldest item, an item staler than the bound is not handed out, one from the future is refused. A key is taken
once, whoever puts it again; a producer that was replaced puts nothing more; what is taken on a lease comes back if its taker dies.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import Field

from paceline.errors import ConfigError, PacelineError
from paceline.notifier import Notifier
from paceline.settings import Settings

REMEMBERED = 65_536  # keys of items that are gone, to know them again when they are put twice


class QueueSettings(Settings):
    max_queue_size: int | None = Field(None, ge=1)
    """Groups the queue holds. No more are generated ahead of the trainer, so that none has to be dropped. Unset: as many as may be under
    way by schedule.max_staleness."""


class DropReason(StrEnum):
    STALE = "stale"
    FUTURE = "future_version"
    QUEUE_FULL = "queue_full"


class FutureVersionError(PacelineError):
    """A sample claims a policy version that the trainer has not made yet."""


class FencedError(PacelineError):
    """A producer that has been replaced wants to put something."""


@dataclass(frozen=True, slots=True)
class Item:
    key: int | str
    param_version: int
    payload: Any
    size: int = 0  # bytes


@dataclass(frozen=True, slots=True)
class Producer:
    """Who puts. A worker that is replaced keeps its name; its incarnation grows."""

    name: str
    incarnation: int = 0


@dataclass(slots=True)
class QueueCounts:
    put: int = 0
    taken: int = 0
    returned: int = 0  # of those taken, because their taker died
    dropped_stale: int = 0
    dropped_future: int = 0
    dropped_full: int = 0
    duplicates_refused: int = 0
    fenced_refused: int = 0


class MessageQueue:
    """Synchronous core; `MessageQueueClient` adds the waiting."""

    def __init__(
        self,
        max_queue_size: int = 1000,
        max_staleness: int = 3,
        on_drop: Callable[[Item, DropReason], None] | None = None,
        changed: Notifier | None = None,
        max_queue_bytes: int | None = None,
    ) -> None:
        self.max_queue_size = max_queue_size
        self.max_queue_bytes = max_queue_bytes
        self.max_staleness = max_staleness
        self.version: int | None = None  # of the trainer, once it has said so
        self.bytes = 0
        self.counts = QueueCounts()
        self.changed = changed or Notifier()
        self.freed = Notifier()  # there is room again; a put wakes nobody who waits for that
        self.on_drop = on_drop
        self._items: dict[int | str, Item] = {}  # oldest first
        self._gone: dict[int | str, None] = {}  # keys taken or dropped, oldest first
        self._leases: dict[int, list[Item]] = {}
        self._lease_ids = itertools.count(1)
        self._incarnations: dict[str, int] = {}  # the lowest that may put, by producer
        self._unnamed = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: int | str) -> bool:
        return key in self._items

    @property
    def utilization(self) -> float:
        return len(self._items) / self.max_queue_size

    def full(self, size: int = 0) -> bool:
        """Whether an item of this many bytes would push another out. One alone always fits."""
        over = self.max_queue_bytes is not None and self.bytes + size > self.max_queue_bytes
        return bool(self._items) and (over or len(self._items) >= self.max_queue_size)

    def fence(self, producer: Producer) -> None:
        """It has been replaced, or is given up: from here on only later incarnations may put."""
        self._incarnations[producer.name] = max(
            self._incarnations.get(producer.name, 0), producer.incarnation + 1
        )

    def set_version(self, version: int) -> None:
        """The trainer says its version; it only grows. From then on, puts from the future are refused at once."""
        if self.version is not None and version < self.version:
            raise FutureVersionError(
                f"the trainer's version went back from {self.version} to {version}; a run's versions only grow"
            )
        self.version = version

    def put(
        self,
        payload: Any,
        param_version: int,
        key: int | str | None = None,
        size: int = 0,
        producer: Producer | None = None,
    ) -> bool:
        """True if the item is in; False if the key was put before. A full queue makes room by dropping its oldest."""
        if producer and producer.incarnation < self._incarnations.get(producer.name, 0):
            self.counts.fenced_refused += 1
            raise FencedError(
                f"incarnation {producer.incarnation} of {producer.name!r} has been replaced: sample {key!r} is refused"
            )
        if self.version is not None and param_version > self.version:
            raise FutureVersionError(
                f"sample {key!r} says version {param_version}, but the trainer has only reached version {self.version}"
            )
        if key is None:
            self._unnamed += 1
            key = f"unnamed-{self._unnamed}"
        if key in self._items or key in self._gone:
            self.counts.duplicates_refused += 1
            return False
        while self.full(size):
            self.counts.dropped_full += 1
            self._drop(next(iter(self._items)), DropReason.QUEUE_FULL)
        self._items[key] = Item(key, param_version, payload, size)
        self.bytes += size
        self.counts.put += 1
        self.changed.notify_all()
        return True

    def get(
        self, count: int, current_param_version: int, keys: Sequence[int | str] | None = None
    ) -> list[Item] | None:
        """`count` fresh items, oldest first (or exactly those named), or None if there are not that many yet.

        Items beyond the staleness bound, or from the future, are dropped on the way.
        """
        leased = self.lease(count, current_param_version, keys)
        if leased is None:
            return None
        self.acknowledge(leased[0])
        return leased[1]

    def lease(
        self, count: int, current_param_version: int, keys: Sequence[int | str] | None = None
    ) -> tuple[int, list[Item]] | None:  # fmt: skip
        """The same, but to be acknowledged: until then the items can come back. The number names the lease."""
        if count < 0:
            raise ConfigError(f"count = {count}: so many samples cannot be taken")
        if len(self._items) < count:
            return None
        for item in list(self._items.values()):
            staleness = current_param_version - item.param_version
            if staleness > self.max_staleness:
                self.counts.dropped_stale += 1
                self._drop(item.key, DropReason.STALE)
            elif staleness < 0:
                self.counts.dropped_future += 1
                self._drop(item.key, DropReason.FUTURE)
        wanted = list(self._items)[:count] if keys is None else list(keys)
        if len(wanted) < count or not all(key in self._items for key in wanted):
            return None
        self.counts.taken += len(wanted)
        number = next(self._lease_ids)
        self._leases[number] = [self._remove(key) for key in wanted]
        return number, self._leases[number]

    def acknowledge(self, lease: int) -> None:
        """What was taken has been used. A second time changes nothing."""
        self._leases.pop(lease, None)

    def give_back(self, lease: int) -> None:
        """What was taken has not been used: it is the oldest there is again."""
        items = self._leases.pop(lease, [])
        for item in items:
            self._gone.pop(item.key, None)
            self.bytes += item.size
        self._items = {item.key: item for item in items} | self._items
        self.counts.returned += len(items)
        self.changed.notify_all()

    def _remove(self, key: int | str) -> Item:
        item = self._items.pop(key)
        self.bytes -= item.size
        self._gone[key] = None
        if len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]
        self.freed.notify_all()
        self.changed.notify_all()
        return item

    def _drop(self, key: int | str, reason: DropReason) -> None:
        item = self._remove(key)
        if self.on_drop:
            self.on_drop(item, reason)


class MessageQueueClient:
    """What rollouters and trainer hold. A full queue drops its oldest, or `put_samples` waits for room; `get_samples` waits.

    In the queue's own process; `paceline.queue.remote` has the client for any other.
    """

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue

    async def put_samples(
        self, samples: Any, param_version: int, key: int | str | None = None, *, wait: bool = False
    ) -> bool:
        """True if they are in, False if the key was put before. `wait`: for room, instead of dropping the oldest."""
        while wait and self.queue.full():
            await self.queue.freed.wait()
        return self.queue.put(samples, param_version, key)

    async def get_samples(
        self, count: int = 1, *, current_param_version: int, timeout_s: float | None = None
    ) -> list[Any]:
        """`count` fresh samples, oldest first. Raises TimeoutError when they do not come in time."""
        async with asyncio.timeout(timeout_s):
            while (items := self.queue.get(count, current_param_version)) is None:
                await self.queue.changed.wait()
        return [item.payload for item in items]
