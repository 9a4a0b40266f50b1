"""Admission: the staleness control. A group needs a ticket to start and gives it back only when the weights it was
trained into are live on the engines, or when it is dropped. Everything else about staleness follows from this. A queue that holds
fewer groups than may be under way holds admission back as well: it would have to drop groups that the trainer is about to take.

Waits for: nothing. Waited for by: the feed (for a free ticket), the trainer (for the oldest tickets' groups).
"""

from paceline.errors import LedgerError
from paceline.notifier import Notifier


class Admission:
    def __init__(
        self, capacity: int, changed: Notifier | None = None, queue_size: int | None = None
    ) -> None:
        self.capacity = capacity
        self.queue_size = queue_size or capacity
        self.changed = changed or Notifier()
        self._coming: dict[
            int, None
        ] = {}  # to the queue, or in it; insertion order is the order of admission
        self._taken: dict[int, None] = {}  # by the trainer, but not yet in the engines' weights

    @property
    def outstanding(self) -> int:
        return len(self._coming) + len(self._taken)

    @property
    def free(self) -> int:
        return min(self.capacity - self.outstanding, self.queue_size - len(self._coming))

    def admit(self, seq: int) -> None:
        if self.free <= 0 or seq in self._coming or seq in self._taken:
            raise LedgerError(
                f"group {seq} admitted without a free ticket ({self.outstanding} of {self.capacity} are out)"
            )
        self._coming[seq] = None
        self.changed.notify_all()

    def oldest(self, count: int) -> list[int]:
        """The next `count` groups to train, in order of admission; fewer if fewer are out."""
        return [seq for seq, _ in zip(self._coming, range(count), strict=False)]

    def take(self, seqs: list[int]) -> None:
        """The trainer has these now."""
        for seq in seqs:
            del self._coming[seq]
            self._taken[seq] = None
        self.changed.notify_all()

    def release_trained(self) -> None:
        """The weights these groups were trained into are live on the engines."""
        self._taken.clear()
        self.changed.notify_all()

    def drop(self, seq: int) -> None:
        self._coming.pop(seq, None)
        self.changed.notify_all()
