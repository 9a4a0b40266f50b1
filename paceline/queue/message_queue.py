"""The bounded queue between rollouter and trainer. Every item carries its policy version.

Admission keeps samples fresh; the rules here are the second line of defense, and each use is
counted: a full queue drops its oldest item, an item beyond the staleness bound is dropped instead
of handed out, an item from a future version is rejected, and a key is accepted only once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import Field

from paceline.errors import ConfigError, PacelineError
from paceline.notifier import Notifier
from paceline.settings import Settings

REMEMBERED_KEYS = 65_536  # of items that were taken or dropped, to recognize a duplicate


class QueueSettings(Settings):
    max_queue_size: int | None = Field(None, ge=1)
    """Queue capacity in groups. Admission never exceeds it, so the queue does not have to drop
    groups. Default: the number of groups that schedule.max_staleness allows in flight."""


class DropReason(StrEnum):
    STALE = "stale"
    FUTURE = "future_version"
    QUEUE_FULL = "queue_full"


class FutureVersionError(PacelineError):
    """A sample claims a policy version that the trainer has not reached."""


@dataclass(frozen=True, slots=True)
class Item:
    key: int | str
    param_version: int
    payload: Any


@dataclass(slots=True)
class QueueCounts:
    put: int = 0
    taken: int = 0
    dropped: int = 0  # because they were stale, from the future, or pushed out of a full queue
    duplicates: int = 0  # rejected, because their key was put before


class MessageQueue:
    """The items, oldest first."""

    def __init__(
        self,
        max_queue_size: int = 1000,
        on_drop: Callable[[Item, DropReason], None] | None = None,
        changed: Notifier | None = None,
    ) -> None:
        self.max_queue_size = max_queue_size
        self.version: int | None = None  # of the trainer, once it is known
        self.counts = QueueCounts()
        self.changed = changed or Notifier()
        self.on_drop = on_drop
        self._items: dict[int | str, Item] = {}
        self._gone: dict[int | str, None] = {}  # keys taken or dropped, oldest first
        self._unnamed = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: int | str) -> bool:
        return key in self._items

    def payloads(self) -> list[Any]:
        return [item.payload for item in self._items.values()]

    @property
    def utilization(self) -> float:
        return len(self._items) / self.max_queue_size

    def set_version(self, version: int) -> None:
        """Set the trainer's version. From then on, `put` rejects later versions."""
        if self.version is not None and version < self.version:
            raise FutureVersionError(
                f"the trainer's version decreased from {self.version} to {version}; "
                "expected a version that only grows"
            )
        self.version = version

    def put(self, payload: Any, param_version: int, key: int | str | None = None) -> bool:
        """Add an item and return True; return False if the key was put before."""
        if self.version is not None and param_version > self.version:
            raise FutureVersionError(
                f"sample {key!r} has version {param_version}, but the trainer has only reached "
                f"version {self.version}"
            )
        if key is None:
            self._unnamed += 1
            key = f"unnamed-{self._unnamed}"
        if key in self._items or key in self._gone:
            self.counts.duplicates += 1
            return False
        while len(self._items) >= self.max_queue_size:
            self._drop(next(iter(self._items)), DropReason.QUEUE_FULL)
        self._items[key] = Item(key, param_version, payload)
        self.counts.put += 1
        self.changed.notify_all()
        return True

    def take(
        self,
        count: int,
        current_param_version: int,
        max_staleness: int,
        keys: Sequence[int | str] | None = None,
    ) -> list[Item] | None:
        """Return the `count` oldest items (or those with `keys`), or None if they are not all
        there.

        Drop every item that is staler than the bound or from a future version first.
        """
        if count < 0:
            raise ConfigError(f"count = {count}: expected 0 or more")
        if len(self._items) < count:
            return None
        oldest = current_param_version - max_staleness
        for item in [
            item
            for item in self._items.values()
            if not oldest <= item.param_version <= current_param_version
        ]:
            stale = item.param_version < oldest
            self._drop(item.key, DropReason.STALE if stale else DropReason.FUTURE)
        wanted = list(self._items)[:count] if keys is None else list(keys)
        if len(wanted) < count or not all(key in self._items for key in wanted):
            return None
        self.counts.taken += len(wanted)
        return [self._remove(key) for key in wanted]

    def _remove(self, key: int | str) -> Item:
        item = self._items.pop(key)
        self._gone[key] = None
        if len(self._gone) > REMEMBERED_KEYS:
            del self._gone[next(iter(self._gone))]
        self.changed.notify_all()
        return item

    def _drop(self, key: int | str, reason: DropReason) -> None:
        self.counts.dropped += 1
        item = self._remove(key)
        if self.on_drop:
            self.on_drop(item, reason)


class MessageQueueClient:
    """Access to the queue for rollouter and trainer, with the staleness bound of the run."""

    def __init__(self, queue: MessageQueue, max_staleness: int = 3) -> None:
        self.queue = queue
        self.max_staleness = max_staleness

    def put_samples(self, samples: Any, param_version: int, key: int | str | None = None) -> bool:
        """Add samples made with `param_version`; return False if the key was put before."""
        return self.queue.put(samples, param_version, key)

    def get_samples(
        self,
        count: int = 1,
        *,
        current_param_version: int,
        keys: Sequence[int | str] | None = None,
    ) -> list[Any] | None:
        """Return the `count` oldest samples (or those with `keys`), or None.

        None means that there are not enough samples within `max_staleness` of the current version.
        """
        items = self.queue.take(count, current_param_version, self.max_staleness, keys)
        return None if items is None else [item.payload for item in items]
