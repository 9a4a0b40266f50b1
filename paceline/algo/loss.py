"""Losses over trained tokens, as pure functions on tensors.

A loss is sum(weight * loss of token), with weights computed once for the whole batch. Its
gradient therefore does not depend on how the batch is split into micro-batches or over ranks,
and the parts can be added.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.algo.correction import (
    fresh_tokens,
    importance_weights,
    interpolated,
    off_policy_measures,
)
from paceline.algo.joined_rows import joined
from paceline.algo.kl import k3, kl_loss
from paceline.algo.objective import objective
from paceline.algo.ratio import probability_ratio
from paceline.algo.settings import Aggregation, AlgorithmSettings
from paceline.errors import ConfigError
from paceline.types import Batch, FloatArray


@dataclass(frozen=True, slots=True)
class TokenData:
    """Trained tokens of one micro-batch, each [M]. A row is never split between micro-batches."""

    rows: Tensor  # index of the token's row in the micro-batch
    weights: Tensor  # weight of the token in the loss of the whole batch
    logprobs: Tensor  # under the policy that sampled the token
    versions: Tensor
    advantages: Tensor | None = None
    returns: Tensor | None = None
    values: Tensor | None = None
    ref_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """Model outputs for the same tokens, each [M].

    A policy gives log-probs and entropy, a critic gives values.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Part of the loss that one micro-batch contributes, with diagnostics."""

    # Scalar; the parts are added.
    loss: Tensor
    # Added over micro-batches, then divided by the number of trained tokens.
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


class LossFn(Protocol):
    def weights(self, batch: Batch) -> FloatArray:
        """Return each token's weight in the loss of the whole batch, 0 if not trained: [T]."""
        ...

    def __call__(self, outputs: TokenOutputs, data: TokenData) -> LossTerms: ...


def token_weights(
    batch: Batch, aggregation: Aggregation, constant_length: int | None = None
) -> FloatArray:
    """Return the weight of each token: [T].

    token: 1 / tokens; sequence: 1 / (rows * tokens of the row);
    constant: 1 / (rows * constant_length). The rows of a trajectory count as one.
    """
    batch = joined(batch)
    row = np.repeat(np.arange(batch.num_rows), batch.lengths)
    per_row = np.bincount(row[batch.mask], minlength=batch.num_rows)
    rows = max(1, int(np.count_nonzero(per_row)))
    if aggregation == "token":
        weight = np.full(batch.num_tokens, 1.0 / max(1, per_row.sum()))
    elif aggregation == "sequence":
        weight = 1.0 / (rows * np.maximum(per_row, 1)[row])
    else:
        if constant_length is None:
            raise ConfigError(
                "aggregation = 'constant' needs a length to divide by: "
                "set algorithm.constant_length"
            )
        weight = np.full(batch.num_tokens, 1.0 / (rows * constant_length))
    return np.where(batch.mask, weight, 0.0).astype(np.float32)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return half the squared error of each token, and where the clip increases it.

    The clipped value stays within `clip` of the old one. The loss is the larger of both errors.
    """
    unclipped = 0.5 * (values - returns).square()
    if clip is None:
        return unclipped, torch.zeros_like(unclipped, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-clip, clip)
    clipped = 0.5 * (near - returns).square()
    return torch.maximum(unclipped, clipped), clipped > unclipped


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Policy objective with off-policy correction, KL to the reference and entropy bonus."""

    settings: AlgorithmSettings
    # Train step, which is also the policy version of fresh tokens.
    step: int = 0
    # Adapted coefficient; replaces that of the settings.
    kl_coef: float | None = None
    # Divisor of the constant aggregation if constant_length is not set.
    max_length: int | None = None
    # Whether log-probs are the proximal policy's and advantages include the weights already.
    corrected: bool = False

    def weights(self, batch: Batch) -> FloatArray:
        return token_weights(
            batch, self.settings.aggregation, self.settings.constant_length or self.max_length
        )

    def __call__(self, outputs: TokenOutputs, data: TokenData) -> LossTerms:
        s = self.settings
        proximal, advantages = data.logprobs, data.advantages
        assert outputs.logprobs is not None and outputs.entropy is not None
        assert advantages is not None
        current = outputs.logprobs.detach()
        sums: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        if not self.corrected:
            fresh = fresh_tokens(data.versions, data.rows, self.step)
            sums, maxima = off_policy_measures(current - data.logprobs, fresh)
        if not self.corrected and s.proximal != "behavior":
            # With one update per step, the policy at its start is the current one, so recomputing
            # it needs no forward pass.
            proximal = (
                current
                if s.proximal == "recomputed"
                else interpolated(current, proximal, data.versions, self.step)
            )
            weights = importance_weights(proximal - data.logprobs, data.rows, s)
            advantages = advantages * weights.values
            sums |= {
                "masked_fraction": weights.masked.sum(),
                "truncated_fraction": weights.truncated.sum(),
            }
        loss, clipped = objective(outputs.logprobs, proximal, advantages, data.rows, s)
        ratio = probability_ratio(current - proximal)
        sums |= {
            "entropy": outputs.entropy.detach().sum(),
            "kl": k3(proximal, current).sum(),  # distance covered since the start of the step
            "ratio_mean": ratio.sum(),
            "clip_fraction": clipped.sum(),
        }
        loss = loss + self._kl_term(outputs.logprobs, data, sums)
        if s.entropy_coef != 0:
            loss = loss - s.entropy_coef * outputs.entropy
        return LossTerms((loss * data.weights).sum(), sums, maxima | {"ratio_max": ratio.max()})

    def _kl_term(
        self, logprobs: Tensor, data: TokenData, sums: dict[str, Tensor]
    ) -> Tensor | float:
        """Return the KL term of the loss. The KL is measured with any placement."""
        coefficient = self.settings.kl_coef if self.kl_coef is None else self.kl_coef
        if data.ref_logprobs is not None:
            sums["kl_reference"] = k3(logprobs.detach(), data.ref_logprobs).sum()
        if coefficient == 0 or self.settings.kl_placement != "loss":
            return 0.0
        if data.ref_logprobs is None:
            raise ConfigError(
                f"kl_coef = {coefficient} needs reference log-probs, but the batch has none: "
                f"add a reference role"
            )
        return coefficient * kl_loss(logprobs, data.ref_logprobs, self.settings.kl_estimator)


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Squared error to the returns, clipped around the values predicted before the update."""

    clip: float | None

    def weights(self, batch: Batch) -> FloatArray:
        return token_weights(batch, "token")

    def __call__(self, outputs: TokenOutputs, data: TokenData) -> LossTerms:
        assert outputs.values is not None and data.values is not None and data.returns is not None
        loss, clipped = clipped_value_loss(outputs.values, data.values, data.returns, self.clip)
        error = (outputs.values - data.returns).detach()
        sums = {
            "value_clip_fraction": clipped.sum(),
            "value_mean": outputs.values.detach().sum(),
            "value_error": error.square().sum(),
        }
        return LossTerms((loss * data.weights).sum(), sums)


@dataclass(frozen=True, slots=True)
class SupervisedLoss:
    """Negative log-likelihood, as the mean over all trained tokens of the batch."""

    def weights(self, batch: Batch) -> FloatArray:
        return token_weights(batch, "token")

    def __call__(self, outputs: TokenOutputs, data: TokenData) -> LossTerms:
        assert outputs.logprobs is not None and outputs.entropy is not None
        sums = {"entropy": outputs.entropy.detach().sum()}
        return LossTerms(-(outputs.logprobs * data.weights).sum(), sums)
