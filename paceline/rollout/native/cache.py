"""The room in the KV cache of the native engine: kept contexts give way to running sequences."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.rollout.native.backend import Backend
from paceline.rollout.native.kept import KeptContexts
from paceline.rollout.native.slots import Sequence, Slots


class Cache:
    def __init__(self, backend: Backend, max_length: int) -> None:
        self._backend = backend
        self.kept = KeptContexts(max_length)

    @property
    def used(self) -> float | None:
        """Fraction in use by running sequences; None if each slot owns its memory."""
        return self._backend.kv_used(self.kept.oldest(len(self.kept)))

    def reserve(self, sequence: Sequence, source: Sequence | None, epoch: int) -> int | None:
        """Reserve memory for a new sequence, or return None if there is no room now.

        Returns the number of its tokens that a kept context has in the cache.
        """
        if source:
            sequence.digest = source.digest
        elif found := self.kept.find(sequence):
            kept, tokens = found
            assert kept.epoch == epoch, "a change of weights drops kept contexts"
            self.kept.remove(kept)  # it must not be dropped to make room for its continuation
            if self._with_room(partial(self._backend.reuse, sequence, kept, tokens)):
                return tokens
            self._backend.free(kept)
        return 0 if self._with_room(partial(self._backend.reserve, sequence, source)) else None

    def grow(self, slots: Slots, positions: NDArray[np.int64]) -> bool:
        """Reserve memory for live sequences up to these positions; return whether there is room."""
        return self._with_room(partial(self._backend.grow, slots, positions))

    def keep(self, slots: Slots, row: int, epoch: int) -> bool:
        """Keep the context of a row that ends, if the current weights computed all of it."""
        sequence, last = slots.live[row], int(slots.position[row])
        generated = slots.tokens[row, len(sequence.context) : last + 1].copy()
        if sequence.epoch != epoch or not len(generated):
            return False
        self.kept.add(sequence, generated)
        self._backend.keep(sequence, row, last)
        return True

    def drop_kept(self) -> None:
        for sequence in self.kept.oldest(len(self.kept)):
            self._drop(sequence)

    def _with_room(self, reserve: Callable[[], bool]) -> bool:
        """Reserve memory; drop the least recently used contexts while there is too little."""
        dropped = 1
        while not reserve():
            if not self.kept:
                return False
            for sequence in self.kept.oldest(dropped):
                self._drop(sequence)
            dropped *= 2  # growing sequences need many pages at once
        return True

    def _drop(self, sequence: Sequence) -> None:
        self.kept.remove(sequence)
        self._backend.free(sequence)
