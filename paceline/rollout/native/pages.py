"""Reference counts of the pages of a KV cache.

Sequences with a common prefix share its pages. Page 0 is never allocated: idle rows write to it.
"""

import numpy as np


class Pages:
    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._free = list(range(count - 1, 0, -1))
        self._holders = np.zeros(count, np.int32)

    @property
    def free(self) -> int:
        return len(self._free)

    def used(self, without: list[list[int]]) -> float:
        """Return the fraction of pages with holders, not counting the holders of these lists."""
        holders = self._holders.copy()
        for pages in without:
            holders[pages] -= 1  # a list has no page twice
        return np.count_nonzero(holders > 0) / max(1, len(holders) - 1)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int] | None:
        """Return `count` free pages, or None if there are fewer."""
        if count > len(self._free):
            return None
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        self._holders[taken] = 1
        return taken

    def share(self, pages: list[int]) -> None:
        self._holders[pages] += 1

    def give_back(self, pages: list[int]) -> None:
        self._holders[pages] -= 1
        self._free += [page for page in pages if self._holders[page] == 0]
