"""Sums and means over the rows that single tokens belong to. A row number is below the number of tokens, since no row is empty."""

import torch
from torch import Tensor


def row_sum(values: Tensor, rows: Tensor) -> Tensor:
    """[M] for each token the sum over its row."""
    return torch.zeros_like(values).index_add(0, rows, values)[rows]


def row_mean(values: Tensor, rows: Tensor) -> Tensor:
    """[M] for each token the mean over its row."""
    return row_sum(values, rows) / row_sum(torch.ones_like(values), rows)
