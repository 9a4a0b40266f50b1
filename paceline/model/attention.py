"""Attention over packed rows for Hugging Face decoders: a token sees earlier tokens of its row
only.

Registered with transformers as `PACKED`. The layout of the rows is a keyword argument of the call,
so two threads can use one module. A call without a layout uses plain SDPA: the module stays an
ordinary transformers model.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from paceline.errors import ModelError
from paceline.model.packing import RowLayout, Varlen

PACKED = "paceline_packed"
# Up to this row length two plain matmuls beat the fused CPU kernel (by 2x at 70 tokens); beyond it
# the scores do not fit in cache.
SHORT_ROW = 256


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, size]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    row_layout: RowLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    special = softcap is not None or s_aux is not None
    if kwargs.get("indices") is not None:
        raise ModelError(
            f"{type(module).__name__} attends to selected tokens only (sparse attention), which "
            "Paceline does not support; use a model with full or sliding attention"
        )
    if row_layout is None and special:
        return _step_by_step(query, key, value, attention_mask, scale, softcap, s_aux).transpose(
            1, 2
        ).contiguous(), None
    if row_layout is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )
        return result
    window = kwargs["sliding_window"] if "sliding_window" in kwargs else _masked_window(module)
    window = window if window and window < row_layout.longest else None
    if (
        row_layout.varlen is not None
        and window is None
        and not special
        and _fits_flash(query, value)
    ):
        return _end_to_end(query, key, value, row_layout.varlen, scale)[None], None
    q, k, v = (_unpack(states, row_layout) for states in (query, key, value))
    if special:
        mask = _band(row_layout.longest, window or row_layout.longest, q.device)
        out = _step_by_step(q, k, v, mask, scale, softcap, s_aux)
    elif window is not None:
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_band(row_layout.longest, window, q.device),
            scale=scale,
            enable_gqa=True,
        )
    elif query.device.type == "cpu" and row_layout.longest <= SHORT_ROW:
        out = _short_rows(q, k, v, scale)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, row_layout.slots)[None], None


def _masked_window(module: Any) -> int | None:
    """Return how far a layer attends if its model tells that to the mask alone, which is unused."""
    config = getattr(module, "config", None)
    has_kinds = getattr(config, "layer_types", None) is not None  # then a layer has its own window
    of_model = None if has_kinds else getattr(config, "sliding_window", None)
    window: int | None = getattr(module, "sliding_window", of_model)
    return window


def _fits_flash(query: Tensor, value: Tensor) -> bool:
    size = query.shape[-1]
    return (
        query.dtype == torch.bfloat16 and size == value.shape[-1] and size % 8 == 0 and size <= 256
    )


def _unpack(states: Tensor, layout: RowLayout) -> Tensor:
    """Unpack [1, heads, T, size] to [rows, heads, longest, size]."""
    _, heads, _, size = states.shape
    return (
        states[0]
        .transpose(0, 1)
        .index_select(0, layout.spread)
        .view(layout.rows, layout.longest, heads, size)
        .transpose(1, 2)
    )


def _end_to_end(query: Tensor, key: Tensor, value: Tensor, rows: Varlen, scale: float) -> Tensor:
    """Attend on a GPU without padding. Returns [T, heads, size]."""
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    if rows.source is not None:
        k, v = k.index_select(0, rows.source), v.index_select(0, rows.source)
    out: Tensor = torch.ops.aten._flash_attention_forward(
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
        scale=scale,
    )[0]
    return out


def _short_rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    rows, heads, length, size = q.shape
    kv = k.shape[1]
    # Query heads that share a key head are stacked along the length: one matmul per key head.
    q = (q * scale).reshape(rows * kv, heads // kv * length, size)
    k, v = k.reshape(rows * kv, length, size), v.reshape(rows * kv, length, v.shape[-1])
    future = torch.full((length, length), float("-inf"), dtype=q.dtype).triu_(1)
    scores = torch.bmm(q, k.transpose(1, 2)).view(rows * kv, heads // kv, length, length) + future
    return torch.bmm(scores.softmax(-1).view(rows * kv, -1, length), v).view(
        rows, heads, length, v.shape[-1]
    )


def _step_by_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with capped scores or attention sinks, which no fused kernel supports."""
    length, groups = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(2, 3)).float() * scale
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    if mask is None and length > 1:  # transformers omits a mask that is only causal
        mask = _band(length, length, q.device)
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
            if mask.dtype == torch.bool
            else scores + mask
        )
    if sinks is not None:
        scores = torch.cat(
            (scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(len(q), -1, length, 1)), -1
        )
    return scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v


def _band(length: int, window: int, device: torch.device) -> Tensor:
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
