"""Small tensor operations that the rollout engine and the trainer share."""

import torch
from torch import Tensor

from paceline.model.linear import product


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices with a result in float32, or in float64 if the inputs are.

    Logits rounded to bfloat16 would be off by several hundredths.
    """
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return product(a, b).to(torch.promote_types(a.dtype, torch.float32))
