"""Sums and means over the rows that tokens belong to.

A row index is smaller than the number of tokens, because every row has at least one token.
"""

import torch
from torch import Tensor


def row_sum(values: Tensor, rows: Tensor) -> Tensor:
    """Return, for each token, the sum over its row: [M]."""
    return torch.zeros_like(values).index_add(0, rows, values)[rows]


def row_mean(values: Tensor, rows: Tensor) -> Tensor:
    """Return, for each token, the mean over its row: [M]."""
    return row_sum(values, rows) / row_sum(torch.ones_like(values), rows)
