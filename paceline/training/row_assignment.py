"""Assignment of a batch's rows to ranks and to the passes that all ranks make together.

Every rank has the whole batch and computes the same assignment, so ranks need not communicate.
A rank without rows for a pass makes an empty pass: the other ranks wait for it in collectives.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from paceline.model.packing import cut_evenly, cut_rows

Rows = NDArray[np.int64]


def assign_rows(lengths: NDArray[np.int64], ranks: int) -> list[Rows]:
    """Return the rows of each rank: the longest row first, each to the rank with the fewest tokens.

    Rows of length 0 are not assigned.
    """
    loads = [(0, rank) for rank in range(ranks)]
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    for row in np.argsort(-lengths, kind="stable"):
        if lengths[row] > 0:
            load, rank = heapq.heappop(loads)
            assigned[rank].append(int(row))
            heapq.heappush(loads, (load + int(lengths[row]), rank))
    return [np.array(rows, np.int64) for rows in assigned]


def assign_passes(lengths: NDArray[np.int64], limit: int, ranks: int) -> list[list[Rows]]:
    """Return the rows of each rank and pass as [rank][pass].

    A pass has at most `limit` tokens, including padding; a longer row has a pass to itself. All
    ranks have the same number of passes; some passes have no rows.
    """
    assigned = assign_rows(lengths, ranks)
    count = max(len(cut_rows(lengths[rows].tolist(), limit)) for rows in assigned)
    return [
        _split(rows, cut_evenly(lengths[rows].tolist(), limit, count), count) for rows in assigned
    ]


def _split(rows: Rows, counts: list[int], passes: int) -> list[Rows]:
    if not counts:
        return [rows] * passes
    empty = [np.zeros(0, np.int64)] * (passes - len(counts))
    return np.split(rows, np.cumsum(counts)[:-1]) + empty
