"""Rows of a KV cache with one row per slot, of which the live ones are dense at the front.

A kept context stays in a row behind the live ones and gives way when that row is needed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.rollout.native.slots import Sequence


@dataclass(frozen=True, slots=True)
class Place:
    """Where the cache has the first `length` tokens of a context."""

    row: int
    column: int
    length: int

    @property
    def start(self) -> tuple[int, int]:
        return self.row, self.column


@dataclass(frozen=True, slots=True)
class Copy:
    source: Place
    row: int
    column: int


class KeptRows:
    """Places of the kept contexts, and of those that new sequences reuse until they are live."""

    def __init__(self, count: int) -> None:
        self.held = 0  # rows of live sequences and of kept contexts
        self._places: dict[Sequence, Place] = {}
        self._in_row: list[Sequence | None] = [None] * count

    @property
    def full(self) -> bool:
        return self.held == len(self._in_row)

    def put(self, sequence: Sequence, place: Place) -> None:
        self._places[sequence] = place
        self._in_row[place.row] = sequence

    def take(self, sequence: Sequence) -> Place | None:
        """Remove a context and return its place, if it is here."""
        place = self._places.pop(sequence, None)
        if place is not None:
            self._in_row[place.row] = None
        return place

    def clear_rows(self, rows: Iterable[int], live: int) -> list[Copy]:
        """Give the contexts in `rows` other rows, behind the first `live` ones.

        Returns the copies that do it. There is always room: every row has at most one holder.
        """
        behind = reversed(range(live, len(self._in_row)))
        free = (row for row in behind if self._in_row[row] is None)
        copies = []
        for sequence in [found for row in rows if (found := self._in_row[row])]:
            place = self.take(sequence)
            assert place is not None, "a context in a row has a place"
            row = next(free)
            copies.append(Copy(place, row, place.column))
            self.put(sequence, replace(place, row=row))
        return copies


Data = list[Tensor]  # keys and values


def copy_at_once(
    copies: list[Copy], read: Callable[[Place], Data], write: Callable[[Data, Copy], None]
) -> None:
    """Perform the copies as if all of them were read before the first is written.

    No two have the same source or target row. `read` returns views of the cache.
    """
    moved = [copy for copy in copies if (copy.row, copy.column) != copy.source.start]
    by_target = {copy.row: copy for copy in moved}
    needed = {copy.source.row for copy in moved}

    def follow(row: int) -> None:
        """Fill a row that is no longer needed, then the row that this one came from, and so on."""
        while copy := by_target.pop(row, None):
            write(read(copy.source), copy)
            row = copy.source.row

    for row in by_target.keys() - needed:
        follow(row)
    while by_target:  # circles: read one context before its row is filled
        _, first = by_target.popitem()
        data = [tensor.clone() for tensor in read(first.source)]
        follow(first.source.row)
        write(data, first)
