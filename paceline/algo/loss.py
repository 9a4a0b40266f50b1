"""Losses over trained tokens: pure functions on tensors.

A loss is `sum(weight * loss of token)`, with the weights computed once over the whole batch. So its gradient does not depend on
how the batch is cut into micro-batches or spread over ranks, and those parts can simply be added.
"""

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.algo.settings import Aggregation, AlgorithmSettings
from paceline.errors import ConfigError
from paceline.types import Batch, FloatArray


@dataclass(frozen=True, slots=True)
class TokenData:
    """What is known of the trained tokens of one micro-batch, each [M]. A row is never split between micro-batches."""

    rows: Tensor  # which row of the micro-batch a token belongs to
    weights: Tensor  # share of a token in the loss of the whole batch
    logprobs: Tensor  # under the policy that sampled it
    versions: Tensor
    advantages: Tensor | None = None
    returns: Tensor | None = None
    values: Tensor | None = None
    ref_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What the model's head says of the same tokens, each [M]: log-prob and entropy from a policy, value from a critic."""

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A micro-batch's part of the loss, and diagnostics that add up over micro-batches."""

    loss: Tensor  # scalar; parts are added
    sums: dict[str, Tensor] = field(default_factory=dict)  # added, then divided by the number of trained tokens
    maxima: dict[str, Tensor] = field(default_factory=dict)


class LossFn(Protocol):
    def weights(self, batch: Batch) -> FloatArray:
        """[T] share of each token in the loss of the whole batch; 0 where not trained."""
        ...

    def __call__(self, outputs: TokenOutputs, data: TokenData) -> LossTerms: ...


def token_weights(batch: Batch, aggregation: Aggregation, constant_length: int | None = None) -> FloatArray:
    """[T] token: 1 / tokens; sequence: 1 / (rows * tokens of the row); constant: 1 / (rows * constant_length)."""
    row = np.repeat(np.arange(batch.num_rows), batch.lengths)
    per_row = np.bincount(row[batch.mask], minlength=batch.num_rows)
    rows = max(1, int(np.count_nonzero(per_row)))
    if aggregation == "token":
        weight = np.full(batch.num_tokens, 1.0 / max(1, per_row.sum()))
    elif aggregation == "sequence":
        weight = 1.0 / (rows * np.maximum(per_row, 1)[row])
    else:
        assert constant_length is not None  # AlgorithmSettings sees to it
        weight = np.full(batch.num_tokens, 1.0 / (rows * constant_length))
    return np.where(batch.mask, weight, 0.0).astype(np.float32)


def clipped_objective(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO's loss of each token, and where the clip took its gradient away."""
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss, cut = torch.maximum(plain, clipped), clipped > plain
    if dual_clip is not None:
        bound = -advantages * dual_clip
        over = (advantages < 0) & (loss > bound)
        loss, cut = torch.where(over, bound, loss), cut | over
    return loss, cut


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || other) from tokens the policy sampled: unbiased, never negative."""
    difference = other - logprobs
    return difference.exp() - 1 - difference


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Half squared error of each token, the worse of moving freely and moving at most `clip`; and where that clip bound."""
    plain = 0.5 * (values - returns).square()
    if clip is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-clip, clip)
    clipped = 0.5 * (near - returns).square()
    return torch.maximum(plain, clipped), clipped > plain


def truncate_importance(batch: Batch, proximal: FloatArray, cap: float) -> Batch:
    """The batch as if sampled by the trainer's own policy at the start of the step, each token weighted by
    min(proximal / sampler, cap). The weight goes into the advantage: the clipped loss scales with it exactly."""
    assert batch.advantages is not None
    weight = np.minimum(np.exp(np.where(batch.mask, proximal - batch.logprobs, 0.0)), cap)
    return replace(batch, logprobs=proximal, advantages=(batch.advantages * weight).astype(np.float32))


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """PPO-clip with optional KL to the reference and entropy bonus."""

    settings: AlgorithmSettings

    def weights(self, batch: Batch) -> FloatArray:
        return token_weights(batch, self.settings.aggregation, self.settings.constant_length)

    def __call__(self, outputs: TokenOutputs, data: TokenData) -> LossTerms:
        s = self.settings
        assert outputs.logprobs is not None and outputs.entropy is not None and data.advantages is not None
        log_ratio = outputs.logprobs - data.logprobs
        loss, cut = clipped_objective(log_ratio, data.advantages, s.clip_low, s.clip_high, s.dual_clip)
        detached = log_ratio.detach()
        ratio = detached.exp()
        sums = {
            "entropy": outputs.entropy.detach().sum(),
            "kl": k3(torch.zeros_like(detached), detached).sum(),  # from the policy that sampled to this one
            "ratio_mean": ratio.sum(),
            "clip_share": cut.sum(),
            "logprob_gap_mean": detached.abs().sum(),
        }
        if s.kl_coef > 0:
            if data.ref_logprobs is None:
                raise ConfigError(f"kl_coef = {s.kl_coef} needs reference log-probs, but the batch has none: add a reference role")
            to_reference = k3(outputs.logprobs, data.ref_logprobs)
            loss = loss + s.kl_coef * to_reference
            sums["kl_reference"] = to_reference.detach().sum()
        if s.entropy_coef != 0:
            loss = loss - s.entropy_coef * outputs.entropy
        return LossTerms((loss * data.weights).sum(), sums, {"ratio_max": ratio.max(), "logprob_gap_max": detached.abs().max()})


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Squared error to the returns, clipped around the values the batch was taken with."""

    clip: float | None

    def weights(self, batch: Batch) -> FloatArray:
        return token_weights(batch, "token")

    def __call__(self, outputs: TokenOutputs, data: TokenData) -> LossTerms:
        assert outputs.values is not None and data.values is not None and data.returns is not None
        loss, cut = clipped_value_loss(outputs.values, data.values, data.returns, self.clip)
        error = (outputs.values - data.returns).detach()
        sums = {"value_clip_share": cut.sum(), "value_mean": outputs.values.detach().sum(), "value_error": error.square().sum()}
        return LossTerms((loss * data.weights).sum(), sums)
