"""Log-probs and entropy from an output layer that is split over tensor-parallel ranks.

No rank has all logits of a token: ranks exchange maxima, sums, the target's log-prob and the
entropy. As in `head.py`, logits exist for one chunk of rows at a time and are recomputed in the
backward pass, which needs no communication.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.model.operations import matmul_float32
from paceline.training.head import chunks


class VocabularyParallelLogprobs(torch.autograd.Function):
    """Log-probs of the targets [M] and entropy [M], equal on all ranks.

    Inputs: hidden [M, D], this rank's rows of the weight [V_rank, D], targets [M]. The gradient of
    `hidden` covers this rank's rows; the caller sums it over ranks.
    """

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
        matrix, local = weight.to(hidden.dtype), targets - first
        for rows in chunks(len(hidden), chunk):
            logits = matmul_float32(hidden[rows], matrix.t()) / temperature
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
        matrix = weight.to(hidden.dtype)
        inside = (local >= 0) & (local < len(weight))
        for rows in chunks(len(hidden), ctx.chunk):
            logits = matmul_float32(hidden[rows], matrix.t()) / ctx.temperature
            log_p = logits - norm[rows, None]
            p = log_p.exp()
            d_logits = p * -to_logprobs[rows, None]
            at_target = (to_logprobs[rows] * inside[rows])[:, None]
            d_logits.scatter_add_(1, local[rows, None].clamp(0, len(weight) - 1), at_target)
            if by_entropy:
                d_logits -= p * (log_p + entropy[rows, None]) * to_entropy[rows, None]
            d_logits = (d_logits / ctx.temperature).to(hidden.dtype)
            torch.mm(d_logits, matrix, out=d_hidden[rows])
            d_weight += matmul_float32(d_logits.t(), hidden[rows])
        return d_hidden, d_weight, None, None, None, None, None


def _at(log_p: Tensor, local: Tensor) -> Tensor:
    """Return the target's log-prob if this rank has the target, otherwise 0."""
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
    """Compute log-probs and entropy in chunks of `chunk` rows, which must be equal on all ranks.

    `weight` is the output layer from vocabulary entry `first` on, without padding.
    """
    logprobs, entropy = VocabularyParallelLogprobs.apply(
        hidden, weight, targets, first, temperature, chunk, group
    )
    return logprobs, entropy
