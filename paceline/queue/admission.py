"""Admission: the staleness control. A group needs a ticket to start and gives it back only when the weights it was
trained into are live on the engines, or when it is dropped. Everything else about staleness follows from this.

Waits for: nothing. Waited for by: the feed (for a free ticket), the trainer (for the oldest tickets' groups).
"""

from paceline.errors import LedgerError
from paceline.queue.pulse import Pulse


class Admission:
    def __init__(self, capacity: int, changed: Pulse | None = None) -> None:
        self.capacity = capacity
        self.changed = changed or Pulse()
        self._untrained: dict[int, None] = {}  # insertion order is the order of admission
        self._trained: dict[int, None] = {}  # trained, but not yet in the engines' weights

    @property
    def outstanding(self) -> int:
        return len(self._untrained) + len(self._trained)

    @property
    def free(self) -> int:
        return self.capacity - self.outstanding

    def admit(self, seq: int) -> None:
        if self.free <= 0 or seq in self._untrained or seq in self._trained:
            raise LedgerError(f"group {seq} admitted without a free ticket ({self.outstanding} of {self.capacity} are out)")
        self._untrained[seq] = None
        self.changed.fire()

    def oldest(self, count: int) -> list[int]:
        """The next `count` groups to train, in order of admission; fewer if fewer are out."""
        return [seq for seq, _ in zip(self._untrained, range(count), strict=False)]

    def trained(self, seqs: list[int]) -> None:
        for seq in seqs:
            del self._untrained[seq]
            self._trained[seq] = None

    def release_trained(self) -> None:
        """The weights these groups were trained into are live on the engines."""
        self._trained.clear()
        self.changed.fire()

    def drop(self, seq: int) -> None:
        self._untrained.pop(seq, None)
        self.changed.fire()
