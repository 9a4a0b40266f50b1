"""Operations between the matmuls of a decoder on a GPU, forward and backward.

They call the kernels of `kernels.py` and torch's flash attention; `decoder.py` calls them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.model.operations import next_power_of_two
from paceline.model.packing import Varlen

# Programs of a kernel that sums over tokens: 8 per multiprocessor of a large GPU.
PROGRAMS = 1056
BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    eps: float

    @property
    def padded_heads(self) -> int:
        """Heads of queries, keys and values together, rounded up to a power of two."""
        return next_power_of_two(self.heads + 2 * self.kv_heads)


@dataclass(frozen=True, slots=True)
class Positions:
    """Rotary cos and sin [T, dim / 2] of a micro-batch's tokens, and the layout of its rows."""

    cos: Tensor
    sin: Tensor
    rows: Varlen


# Output [T, heads * dim], and further tensors for the backward pass.
Attended = tuple[Tensor, tuple[Any, ...]]


class Operations:
    def __init__(self, shape: Shape) -> None:
        # Only machines with a GPU have Triton, which these modules need.
        from paceline.model.kernels import silu_mul
        from paceline.training import kernels

        self.shape, self._kernels, self._silu_mul = shape, kernels, silu_mul

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + delta, and its norm in the dtype of the weight."""
        out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
        total = x if delta is None else torch.empty_like(x)
        width = x.shape[1]
        self._kernels.add_norm[(len(x),)](
            x, x if delta is None else delta, weight, total, out, self.shape.eps,
            WIDTH=width, BLOCK=next_power_of_two(width), ADD=delta is not None,
            num_warps=_warps(width),
        )  # fmt: skip
        return total, out

    def norm_backward(
        self, x: Tensor, weight: Tensor, d_out: Tensor, d_x: Tensor, d_weight: Tensor
    ) -> Tensor:
        """Add the gradients to d_x and d_weight; return d_x in the dtype of the weight."""
        d_cast = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
        programs, width = min(PROGRAMS, len(x)), x.shape[1]
        parts = torch.empty(programs, width, device=x.device)
        self._kernels.norm_backward[(programs,)](
            x, weight, d_out, d_x, d_cast, parts, self.shape.eps, len(x),
            WIDTH=width, BLOCK=next_power_of_two(width), num_warps=_warps(width),
        )  # fmt: skip
        d_weight += parts.sum(0)
        return d_cast

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[1] // 2
        out = torch.empty(len(gate_up), width, dtype=gate_up.dtype, device=gate_up.device)
        self._silu_mul[(len(gate_up), -(-width // BLOCK))](gate_up, out, WIDTH=width, BLOCK=BLOCK)
        return out

    def silu_mul_backward(self, gate_up: Tensor, d_out: Tensor) -> Tensor:
        """Replace gate_up by its gradient; return the recomputed output of `silu_mul`."""
        width = gate_up.shape[1] // 2
        out = torch.empty_like(d_out)
        self._kernels.silu_mul_backward[(len(gate_up), -(-width // BLOCK))](
            gate_up, d_out, out, WIDTH=width, BLOCK=BLOCK
        )
        return out

    def rotate(
        self, qkv: Tensor, at: Positions, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> Tensor:
        """Rotate queries and keys by position, after their norms; without norms in place."""
        out = qkv if q_norm is None else torch.empty_like(qkv)
        s = self.shape
        self._kernels.rotate[(len(qkv),)](
            qkv, out, at.cos, at.sin,
            qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, s.eps,
            HEADS=s.heads, KV=s.kv_heads, DIM=s.dim, ROWS=s.padded_heads,
            NORMED=q_norm is not None,
        )  # fmt: skip
        return out

    def rotate_backward(
        self,
        d_qkv: Tensor,
        qkv: Tensor,
        at: Positions,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """Turn d_qkv, the gradient of `rotate`'s output, into that of `qkv`, in place.

        Returns the gradients of the norms, if any.
        """
        s, programs = self.shape, min(PROGRAMS, len(qkv))
        norms = torch.empty(programs, 2, s.dim, device=qkv.device) if q_norm is not None else None
        self._kernels.rotate_backward[(programs,)](
            d_qkv, qkv, at.cos, at.sin,
            qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            d_qkv if norms is None else norms, s.eps, len(qkv),
            HEADS=s.heads, KV=s.kv_heads, DIM=s.dim, ROWS=s.padded_heads,
            NORMED=q_norm is not None,
        )  # fmt: skip
        if norms is None:
            return None
        of_q, of_k = norms.sum(0)
        return of_q, of_k

    def attend(self, qkv: Tensor, at: Positions) -> Attended:
        q, k, v = self._split(qkv, at.rows)
        rows = at.rows
        out, *rest = torch.ops.aten._flash_attention_forward(
            q, k, v, rows.queries, rows.keys, rows.longest_query, rows.longest_key,
            0.0, True, False, scale=self.shape.dim**-0.5,
        )  # fmt: skip
        return out.view(len(qkv), -1), tuple(rest[:3])

    def attend_backward(
        self, d_out: Tensor, qkv: Tensor, attended: Attended, at: Positions
    ) -> Tensor:
        q, k, v = self._split(qkv, at.rows)
        rows, s = at.rows, self.shape
        out, (log, seed, offset) = attended
        d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
            d_out.view_as(q), q, k, v, out.view_as(q), log,
            rows.queries, rows.keys, rows.longest_query, rows.longest_key,
            0.0, True, seed, offset, scale=s.dim**-0.5,
        )  # fmt: skip
        d_qkv = torch.empty_like(qkv)
        width = s.heads * s.dim
        d_qkv[:, :width] = d_q.flatten(1)
        if rows.source is None:
            d_qkv[:, width:].view(len(qkv), 2, -1)[:, 0] = d_k.flatten(1)
            d_qkv[:, width:].view(len(qkv), 2, -1)[:, 1] = d_v.flatten(1)
        else:  # sum the gradients of a token that several rows share
            both = torch.cat((d_k.flatten(1), d_v.flatten(1)), 1).float()
            total = torch.zeros(len(qkv), both.shape[1], device=qkv.device)
            d_qkv[:, width:] = total.index_add_(0, rows.source, both)
        return d_qkv

    def _split(self, qkv: Tensor, rows: Varlen) -> tuple[Tensor, Tensor, Tensor]:
        s = self.shape
        q, kv = qkv.split((s.heads * s.dim, 2 * s.kv_heads * s.dim), 1)
        if rows.source is not None:
            kv = kv.index_select(0, rows.source)
        k, v = kv.unflatten(1, (2, s.kv_heads, s.dim)).unbind(1)
        return q.unflatten(1, (s.heads, s.dim)), k, v


def _warps(width: int) -> int:
    return min(8, max(1, next_power_of_two(width) // 256))
