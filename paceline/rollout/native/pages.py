"""Reference counts of the pages of a KV cache.

Sequences with a common prefix share its pages. Page 0 is never allocated: idle rows write to it.
"""

from collections import Counter
from itertools import chain


class Pages:
    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._free = list(range(count - 1, 0, -1))
        # A list, because a sequence has a few pages: too few for an operation of numpy to pay.
        self._holders = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def used(self, without: list[list[int]]) -> float:
        """Return the fraction of pages with holders, not counting the holders of these lists."""
        counts = Counter(chain.from_iterable(without))  # a list has no page twice
        unused = sum(self._holders[page] == count for page, count in counts.items())
        pages = len(self._holders) - 1
        return (pages - len(self._free) - unused) / max(1, pages)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int] | None:
        """Return `count` free pages, or None if there are fewer."""
        if count > len(self._free):
            return None
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: list[int]) -> None:
        for page in pages:
            self._holders[page] += 1

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
