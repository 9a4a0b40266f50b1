"""Log-probs and entropy from an output layer whose rows are spread over tensor-parallel ranks.

No rank ever has all logits of a token: maxima, sums and the target's logit are exchanged instead, three numbers per token. As in
`head.py` logits live for a chunk of rows at a time and are computed again in the backward pass, which exchanges nothing.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.train.head import chunks, wide_product


class VocabularyParallelLogprobs(torch.autograd.Function):
    """(hidden [M, D], weight [rows of this rank, D], targets [M]) -> log-prob of the targets [M], entropy [M], alike on all ranks.

    The gradient of `hidden` is this rank's part; ranks' parts are to be added."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        first: int,
        temperature: float,
        chunk: int,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        both = torch.empty(2, len(hidden), device=hidden.device)
        norm = torch.empty(len(hidden), device=hidden.device)
        narrow, local = weight.to(hidden.dtype), targets - first
        for rows in chunks(len(hidden), chunk):
            logits = wide_product(hidden[rows], narrow.t()) / temperature
            peak = logits.amax(-1)
            dist.all_reduce(peak, dist.ReduceOp.MAX, group)
            total = (logits - peak[:, None]).exp().sum(-1)
            dist.all_reduce(total, group=group)
            norm[rows] = peak + total.log()
            log_p = logits - norm[rows, None]
            both[0, rows] = _at(log_p, local[rows])
            both[1, rows] = -(log_p.exp() * log_p).sum(-1)
        dist.all_reduce(both, group=group)
        ctx.save_for_backward(hidden, weight, local, norm, both[1])
        ctx.temperature, ctx.chunk = temperature, chunk
        return both[0].clone(), both[1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, norm, entropy = ctx.saved_tensors
        to_logprobs, to_entropy = upstream
        by_entropy = bool(to_entropy.any())
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        narrow = weight.to(hidden.dtype)
        inside = (local >= 0) & (local < len(weight))
        for rows in chunks(len(hidden), ctx.chunk):
            log_p = wide_product(hidden[rows], narrow.t()) / ctx.temperature - norm[rows, None]
            p = log_p.exp()
            d_logits = p * -to_logprobs[rows, None]
            here = (to_logprobs[rows] * inside[rows])[:, None]
            d_logits.scatter_add_(1, local[rows, None].clamp(0, len(weight) - 1), here)
            if by_entropy:
                d_logits -= p * (log_p + entropy[rows, None]) * to_entropy[rows, None]
            d_logits = (d_logits / ctx.temperature).to(hidden.dtype)
            torch.mm(d_logits, narrow, out=d_hidden[rows])
            d_weight += wide_product(d_logits.t(), hidden[rows])
        return d_hidden, d_weight, None, None, None, None, None


def _at(log_p: Tensor, local: Tensor) -> Tensor:
    """The target's log-prob where this rank has it, 0 elsewhere."""
    inside = (local >= 0) & (local < log_p.shape[1])
    return log_p.gather(1, local.clamp(0, log_p.shape[1] - 1)[:, None])[:, 0] * inside


def vocabulary_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    first: int,
    temperature: float,
    group: dist.ProcessGroup,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """`weight` is the output layer from vocabulary entry `first` on, without padding; `chunk` rows at a time, alike on all ranks."""
    logprobs, entropy = VocabularyParallelLogprobs.apply(
        hidden, weight, targets, first, temperature, chunk, group
    )
    return logprobs, entropy
