"""Numbers in FP8 (float8_e4m3fn), for the KV cache and the weights of a rollout engine."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values as `dtype` stores them; those beyond its range saturate."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype).to(values.dtype)
