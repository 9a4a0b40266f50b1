"""Losses over trained tokens: pure functions on tensors.

A loss is `sum(weight * loss of token)`, with the weights computed once over the whole batch. So its gradient does not depend on
how the batch is cut into micro-batches or spread over ranks, and those parts can simply be added.
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
from paceline.algo.kl import k3, kl_loss
from paceline.algo.objective import objective
from paceline.algo.ratio import probability_ratio
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
    sums: dict[str, Tensor] = field(
        default_factory=dict
    )  # added, then divided by the number of trained tokens
    maxima: dict[str, Tensor] = field(default_factory=dict)


class LossFn(Protocol):
    def weights(self, batch: Batch) -> FloatArray:
        """[T] share of each token in the loss of the whole batch; 0 where not trained."""
        ...

    def __call__(self, outputs: TokenOutputs, data: TokenData) -> LossTerms: ...


def token_weights(
    batch: Batch, aggregation: Aggregation, constant_length: int | None = None
) -> FloatArray:
    """[T] token: 1 / tokens; sequence: 1 / (rows * tokens of the row); constant: 1 / (rows * constant_length)."""
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
                "aggregation = 'constant' needs a length to divide by: set algorithm.constant_length"
            )
        weight = np.full(batch.num_tokens, 1.0 / (rows * constant_length))
    return np.where(batch.mask, weight, 0.0).astype(np.float32)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Half squared error of each token, the worse of moving freely and moving at most `clip`; and where that clip bound."""
    plain = 0.5 * (values - returns).square()
    if clip is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-clip, clip)
    clipped = 0.5 * (near - returns).square()
    return torch.maximum(plain, clipped), clipped > plain


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The policy objective with its off-policy correction, KL to the reference and entropy bonus."""

    settings: AlgorithmSettings
    step: int = 0  # also the policy version of fresh tokens
    kl_coef: float | None = None  # in place of the settings' when it is being adapted
    max_length: int | None = (
        None  # what the constant aggregation divides by when the settings do not say
    )
    corrected: bool = (
        False  # log-probs are already the proximal policy's and advantages carry the weights
    )

    def weights(self, batch: Batch) -> FloatArray:
        return token_weights(
            batch, self.settings.aggregation, self.settings.constant_length or self.max_length
        )

    def __call__(self, outputs: TokenOutputs, data: TokenData) -> LossTerms:
        s = self.settings
        assert (
            outputs.logprobs is not None
            and outputs.entropy is not None
            and data.advantages is not None
        )
        current = outputs.logprobs.detach()
        fresh = fresh_tokens(data.versions, data.rows, self.step)
        sums, maxima = (
            ({}, {}) if self.corrected else off_policy_measures(current - data.logprobs, fresh)
        )
        anchor, advantages = data.logprobs, data.advantages
        if not self.corrected and s.proximal != "behavior":
            # With one update per step the policy at its start is the current one, so recomputing it costs nothing.
            anchor = (
                current
                if s.proximal == "recomputed"
                else interpolated(current, anchor, data.versions, self.step)
            )
            weights = importance_weights(anchor - data.logprobs, data.rows, s)
            advantages = advantages * weights.values
            sums |= {
                "masked_fraction": weights.masked.sum(),
                "truncated_fraction": weights.truncated.sum(),
            }
        loss, cut = objective(outputs.logprobs, anchor, advantages, data.rows, s)
        ratio = probability_ratio(current - anchor)
        sums |= {
            "entropy": outputs.entropy.detach().sum(),
            "kl": k3(anchor, current).sum(),  # how far this step has come
            "ratio_mean": ratio.sum(),
            "clip_fraction": cut.sum(),
        }
        loss = loss + self._kl_term(outputs.logprobs, data, sums)
        if s.entropy_coef != 0:
            loss = loss - s.entropy_coef * outputs.entropy
        return LossTerms((loss * data.weights).sum(), sums, maxima | {"ratio_max": ratio.max()})

    def _kl_term(
        self, logprobs: Tensor, data: TokenData, sums: dict[str, Tensor]
    ) -> Tensor | float:
        """The reference's part of the loss; its distance is measured wherever the KL is placed."""
        coefficient = self.settings.kl_coef if self.kl_coef is None else self.kl_coef
        if data.ref_logprobs is not None:
            sums["kl_reference"] = k3(logprobs.detach(), data.ref_logprobs).sum()
        if coefficient == 0 or self.settings.kl_placement == "reward":
            return 0.0
        if data.ref_logprobs is None:
            raise ConfigError(
                f"kl_coef = {coefficient} needs reference log-probs, but the batch has none: add a reference role"
            )
        return coefficient * kl_loss(logprobs, data.ref_logprobs, self.settings.kl_estimator)


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
        sums = {
            "value_clip_fraction": cut.sum(),
            "value_mean": outputs.values.detach().sum(),
            "value_error": error.square().sum(),
        }
        return LossTerms((loss * data.weights).sum(), sums)
