"""Small tensor operations that the rollout engine and the trainer share."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

# torch multiplies float32 matrices with MKL, which uses only half of the vector width on AMD
# processors. oneDNN uses all of it, but a call costs 10 us more: it pays for larger matrices.
LARGE_MATRIX = 2**16


def _on_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


_ONEDNN = (
    _on_amd()
    and torch.backends.mkldnn.is_available()
    and "AVX" in torch.backends.cpu.get_cpu_capability()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # private, so a later torch may lack it
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.t() + bias."""
    if uses_onednn(x, weight):
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
        return out
    return functional.linear(x, weight, bias)


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` calls oneDNN, which computes no gradients.

    It depends on the weight alone and not on the number of rows, so that a row has the same result
    in every batch of two or more rows.
    """
    return (
        x.is_cpu
        and x.dtype == torch.float32
        and weight.numel() > LARGE_MATRIX
        and _ONEDNN
        and not torch.is_grad_enabled()
    )


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices with a result in float32, or in float64 if the inputs are.

    Logits rounded to bfloat16 would be off by several hundredths.
    """
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).to(torch.promote_types(a.dtype, torch.float32))
