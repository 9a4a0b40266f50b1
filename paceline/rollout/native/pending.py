"""Work that the native engine has started: prefills, and bursts that have not been read."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.rollout.native.backend import Burst
from paceline.rollout.native.slots import Sequence, Slots


@dataclass(slots=True, eq=False)
class PendingPrefill:
    """A context that is being prefilled for `source` and for `copies` with the same context.

    Unless `new`, `source` is live: its context is in the cache and needs no prefill.
    """

    source: Sequence
    copies: list[Sequence]
    new: bool
    done: int  # tokens in the cache

    @property
    def sequences(self) -> list[Sequence]:
        return [self.source, *self.copies] if self.new else self.copies

    @property
    def left(self) -> int:
        """Number of tokens to prefill; the last token is the input of the first decode step."""
        return len(self.source.context) - 1 - self.done if self.new else 0


@dataclass(frozen=True, slots=True)
class InFlightBurst:
    """A burst that was started and has not been read, with its sequences."""

    burst: Burst
    steps: int
    arrivals: NDArray[np.int64]  # of the sequence in each row
    version: int

    def still_in(self, slots: Slots) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows whose sequences are part of the burst, and their columns in it."""
        now = slots.arrival[: len(slots.live)]
        if np.array_equal(now, self.arrivals):
            rows = np.arange(len(now))
            return rows, rows
        # some sequences have ended, are new or moved to other rows
        order = np.argsort(self.arrivals)
        places = np.searchsorted(self.arrivals, now, sorter=order)
        columns = order[np.minimum(places, len(order) - 1)]
        rows = np.flatnonzero(self.arrivals[columns] == now)
        return rows, columns[rows]
