"""Numbers in FP8 (float8_e4m3fn), for the KV cache and the weights of a rollout engine."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values as `dtype` stores them; those beyond its range saturate."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype).to(values.dtype)


def quantize(weight: Tensor, target: Tensor, scale: Tensor) -> None:
    """Store a matrix in FP8, with the factor of each output in `scale`.

    The factors are powers of two, so the stored numbers times their factor are exact in bfloat16,
    and all kernels compute with the same weights.
    """
    weight = weight.to(target.device)
    exponent = torch.frexp(weight.abs().amax(1).float() / LARGEST).exponent.clamp(-126, 127)
    scale.copy_(((exponent + 127) << 23).view(torch.float32))  # 2 ** exponent, to the last bit
    target.copy_(weight / scale.to(weight.dtype)[:, None])


def dequantized(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).mul_(scale.to(dtype)[:, None])
