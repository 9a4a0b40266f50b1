"""Products of float32 matrices on a CPU, and linear layers that compute theirs in the same way.

torch multiplies float32 matrices with MKL, which uses only half of the vector width on AMD
processors. oneDNN uses all of it, but a call costs 10 us more: it pays for larger matrices.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

LARGE_MATRIX = 2**16  # numbers
PACKED_BYTES = 2**31  # of all weights; packed ones need as much memory again
LARGE_PRODUCT = 2**22  # multiplications


def _on_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


_ONEDNN = (
    _on_amd()
    and torch.backends.mkldnn.is_available()
    and "AVX" in torch.backends.cpu.get_cpu_capability()
    # private, so a later torch may lack them
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.t() + bias."""
    if uses_onednn(x, weight):
        return _onednn(x, weight, bias)
    return functional.linear(x, weight, bias)


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` calls oneDNN, which computes no gradients.

    It depends on the weight alone and not on the number of rows, so that a row has the same result
    in every batch of two or more rows.
    """
    large = weight.is_mkldnn or weight.numel() > LARGE_MATRIX
    return _ONEDNN and _plain(x) and large and not torch.is_grad_enabled()


def packs(size: int) -> bool:
    """Return whether an engine packs its weights, which have this many bytes."""
    return _ONEDNN and size <= PACKED_BYTES


def pack(weight: Tensor) -> Tensor:
    """Return a copy of the weight in oneDNN's own layout, only for `linear`, if that is faster.

    Otherwise oneDNN copies it into that layout for every product.
    """
    if _ONEDNN and _plain(weight) and weight.numel() > LARGE_MATRIX:
        out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        return out
    return weight


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of two matrices."""
    if _pays(a, b.shape[1]) and not torch.is_grad_enabled():
        return _onednn(a, b.t())
    return torch.mm(a, b)


class TrainedLinear(nn.Linear):
    """A linear layer that multiplies large matrices with oneDNN in both directions."""

    def forward(self, x: Tensor) -> Tensor:
        # Wrapped weights, for example those of several devices, have their own product.
        plain = type(self.weight) in (Tensor, nn.Parameter) and self.weight.dtype == torch.float32
        if plain and _pays(x, self.out_features) and not torch.is_autocast_enabled("cpu"):
            out: Tensor = _Linear.apply(x, self.weight, self.bias)
            return out
        return super().forward(x)


def speed_up_linears(model: nn.Module) -> None:
    """Turn the linear layers of a model into TrainedLinear where that is faster."""
    for module in model.modules() if _ONEDNN else ():
        if type(module) is nn.Linear:
            module.__class__ = TrainedLinear


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        rows = upstream.flatten(0, -2)
        return (
            _onednn(upstream, weight.t()) if to_x else None,
            _onednn(rows.t(), x.flatten(0, -2).t()) if to_weight else None,
            rows.sum(0) if to_bias else None,
        )


def _pays(x: Tensor, columns: int) -> bool:
    return _ONEDNN and _plain(x) and x.numel() * columns >= LARGE_PRODUCT


def _plain(x: Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.float32


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out
