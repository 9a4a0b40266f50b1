"""Admission: limits the groups in flight, and so staleness. Every group needs a ticket to start.

A group keeps its ticket until the weights it was trained into are live on the engines, or until it
is dropped. The staleness bound follows from this. A queue that is smaller than the number of
tickets limits admission too, because it would have to drop groups that the trainer is about to
take.

Waits for: nothing. Awaited by: the feed (for a free ticket) and the trainer (for the oldest
groups).
"""

from itertools import islice

from paceline.errors import LedgerError
from paceline.notifier import Notifier


class Admission:
    def __init__(
        self, capacity: int, changed: Notifier | None = None, queue_size: int | None = None
    ) -> None:
        self.capacity = capacity
        self.queue_size = queue_size or capacity
        self.changed = changed or Notifier()
        # Being generated or queued; insertion order is the order of admission.
        self._coming: dict[int, None] = {}
        # Taken by the trainer, but not yet part of the engines' weights.
        self._taken: dict[int, None] = {}

    @property
    def outstanding(self) -> int:
        return len(self._coming) + len(self._taken)

    @property
    def free(self) -> int:
        return min(self.capacity - self.outstanding, self.queue_size - len(self._coming))

    def admit(self, seq: int) -> None:
        if self.free <= 0 or seq in self._coming or seq in self._taken:
            raise LedgerError(
                f"group {seq} admitted without a free ticket "
                f"({self.outstanding} of {self.capacity} are in use)"
            )
        self._coming[seq] = None
        self.changed.notify_all()

    def oldest(self, count: int) -> list[int]:
        """Return the next `count` groups to train, in order of admission, or all if there are
        fewer."""
        return list(islice(self._coming, count))

    def take(self, seqs: list[int]) -> None:
        """Mark groups as taken by the trainer."""
        for seq in seqs:
            del self._coming[seq]
            self._taken[seq] = None
        self.changed.notify_all()

    def release_trained(self) -> None:
        """Free the tickets of taken groups: the weights they were trained into are live."""
        self._taken.clear()
        self.changed.notify_all()

    def drop(self, seq: int) -> None:
        self._coming.pop(seq, None)
        self._taken.pop(seq, None)
        self.changed.notify_all()
