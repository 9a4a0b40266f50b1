"""The operations between matrix products that a decoder trains with on a GPU, forward and backward, over our kernels and torch's flash
attention. `decoder.py` says in which order."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.model.operations import next_power_of_two
from paceline.model.packing import Varlen

PROGRAMS = 1056  # of kernels that add up over tokens: 8 for each multiprocessor of a large GPU
BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """Of attention."""

    heads: int
    kv_heads: int
    dim: int
    eps: float

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


@dataclass(frozen=True, slots=True)
class Positions:
    """Where the tokens of a micro-batch stand: cos and sin of their rotation [T, dim / 2], and the rows they belong to."""

    cos: Tensor
    sin: Tensor
    rows: Varlen


Attended = tuple[
    Tensor, tuple[Any, ...]
]  # [T, heads * dim], and what its backward pass needs besides


class Operations:
    def __init__(self, shape: Shape) -> None:
        # Only machines with a GPU have Triton, which these modules need.
        from paceline.model.kernels import silu_mul
        from paceline.train import kernels

        self.shape, self._kernels, self._silu_mul = shape, kernels, silu_mul

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta, and its norm in the type of the weight."""
        out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
        total = x if delta is None else torch.empty_like(x)
        width = x.shape[1]
        self._kernels.add_norm[(len(x),)](
            x, x if delta is None else delta, weight, total, out, self.shape.eps,
            WIDTH=width, BLOCK=next_power_of_two(width), ADD=delta is not None, num_warps=_warps(width),
        )  # fmt: skip
        return total, out

    def norm_backward(
        self, x: Tensor, weight: Tensor, d_out: Tensor, d_x: Tensor, d_weight: Tensor
    ) -> Tensor:
        """Adds to d_x and d_weight; d_x in the type of the weight."""
        narrow = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
        programs, width = min(PROGRAMS, len(x)), x.shape[1]
        parts = torch.empty(programs, width, device=x.device)
        self._kernels.norm_backward[(programs,)](
            x,
            weight,
            d_out,
            d_x,
            narrow,
            parts,
            self.shape.eps,
            len(x),
            WIDTH=width,
            BLOCK=next_power_of_two(width),
            num_warps=_warps(width),
        )
        d_weight += parts.sum(0)
        return narrow

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[1] // 2
        out = torch.empty(len(gate_up), width, dtype=gate_up.dtype, device=gate_up.device)
        self._silu_mul[(len(gate_up), -(-width // BLOCK))](gate_up, out, WIDTH=width, BLOCK=BLOCK)
        return out

    def silu_mul_backward(self, gate_up: Tensor, d_out: Tensor) -> Tensor:
        """gate_up becomes its gradient; what `silu_mul` made of it is returned."""
        width = gate_up.shape[1] // 2
        out = torch.empty_like(d_out)
        self._kernels.silu_mul_backward[(len(gate_up), -(-width // BLOCK))](
            gate_up, d_out, out, WIDTH=width, BLOCK=BLOCK
        )
        return out

    def rotate(
        self, qkv: Tensor, at: Positions, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> Tensor:
        """Turned by position, after the norms if there are any; without them in place."""
        out = qkv if q_norm is None else torch.empty_like(qkv)
        s = self.shape
        self._kernels.rotate[(len(qkv),)](
            qkv, out, at.cos, at.sin, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, s.eps,
            HEADS=s.heads, KV=s.kv_heads, DIM=s.dim, ROWS=next_power_of_two(s.heads + 2 * s.kv_heads), NORMED=q_norm is not None,
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
        """d_qkv, of what `rotate` gave, becomes that of `qkv`; the gradients of the norms."""
        s, programs = self.shape, min(PROGRAMS, len(qkv))
        norms = torch.empty(programs, 2, s.dim, device=qkv.device) if q_norm is not None else None
        self._kernels.rotate_backward[(programs,)](
            d_qkv, qkv, at.cos, at.sin, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            d_qkv if norms is None else norms, s.eps, len(qkv),
            HEADS=s.heads, KV=s.kv_heads, DIM=s.dim, ROWS=next_power_of_two(s.heads + 2 * s.kv_heads), NORMED=q_norm is not None,
        )  # fmt: skip
        if norms is None:
            return None
        of_q, of_k = norms.sum(0)
        return of_q, of_k

    def attend(self, qkv: Tensor, at: Positions) -> Attended:
        q, k, v = self._split(qkv, at.rows)
        rows = at.rows
        out, *rest = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            rows.queries,
            rows.keys,
            rows.longest_query,
            rows.longest_key,
            0.0,
            True,
            False,
            scale=self.shape.dim**-0.5,
        )
        return out.view(len(qkv), -1), tuple(rest[:3])

    def attend_backward(
        self, d_out: Tensor, qkv: Tensor, attended: Attended, at: Positions
    ) -> Tensor:
        q, k, v = self._split(qkv, at.rows)
        rows, s = at.rows, self.shape
        out, (log, seed, offset) = attended
        d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
            d_out.view_as(q), q, k, v, out.view_as(q), log, rows.queries, rows.keys, rows.longest_query, rows.longest_key,
            0.0, True, seed, offset, scale=s.dim**-0.5,
        )  # fmt: skip
        d_qkv = torch.empty_like(qkv)
        wide = s.heads * s.dim
        d_qkv[:, :wide] = d_q.flatten(1)
        if rows.source is None:
            d_qkv[:, wide:].view(len(qkv), 2, -1)[:, 0] = d_k.flatten(1)
            d_qkv[:, wide:].view(len(qkv), 2, -1)[:, 1] = d_v.flatten(1)
        else:  # a token that several rows see gets the sum of what they say
            both = torch.cat((d_k.flatten(1), d_v.flatten(1)), 1).float()
            d_qkv[:, wide:] = torch.zeros(len(qkv), both.shape[1], device=qkv.device).index_add_(
                0, rows.source, both
            )
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
