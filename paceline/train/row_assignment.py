"""Who works on which rows: a batch dealt out to ranks by tokens, and cut into passes that all ranks make together.

Every rank has the whole batch and computes the same deal, so nothing needs to be agreed on. Any number of rows will do: a rank
without rows for a pass makes it with nothing, because the others wait for it in every collective operation.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from paceline.model.packing import cut_evenly, cut_rows

Rows = NDArray[np.int64]


def deal_rows(lengths: NDArray[np.int64], ranks: int) -> list[Rows]:
    """Rows of each rank, longest first: each goes to the rank that has the fewest tokens. Rows of length 0 go to nobody."""
    loads = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for row in np.argsort(-lengths, kind="stable"):
        if lengths[row] > 0:
            load, rank = heapq.heappop(loads)
            shares[rank].append(int(row))
            heapq.heappush(loads, (load + int(lengths[row]), rank))
    return [np.array(share, np.int64) for share in shares]


def passes(lengths: NDArray[np.int64], limit: int, ranks: int) -> list[list[Rows]]:
    """[rank][pass] -> rows: at most `limit` tokens each, padding counted (a longer row goes alone). All ranks have the same number
    of passes; some may have no rows."""
    shares = deal_rows(lengths, ranks)
    count = max(len(cut_rows(lengths[share].tolist(), limit)) for share in shares)
    return [
        _cut(share, cut_evenly(lengths[share].tolist(), limit, count), count) for share in shares
    ]


def _cut(rows: Rows, counts: list[int], passes: int) -> list[Rows]:
    return (
        np.split(rows, np.cumsum(counts)[:-1]) + [np.zeros(0, np.int64)] * (passes - len(counts))
        if counts
        else [rows] * passes
    )
