"""Policy objectives: the loss of each trained token, and which tokens a clip affects.

A clip removes the gradient of a token; in CISPO it bounds the token's weight. `proximal` holds
the log-probs that ratios are taken against. `advantages` already include off-policy weights.
"""

import torch
from torch import Tensor

from paceline.algo.custom import custom_loss
from paceline.algo.ratio import probability_ratio
from paceline.algo.rows import row_mean
from paceline.algo.settings import AlgorithmSettings, Range
from paceline.plugins import Plugin


def clipped_objective(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the PPO loss max(-A r, -A clip(r, 1 - low, 1 + high)) and where it is clipped.

    With a dual clip, the loss is at most -A dual_clip where A < 0.
    """
    ratio = probability_ratio(log_ratio)
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss, clipped = torch.maximum(unclipped, bounded), bounded > unclipped
    if dual_clip is not None:
        bound = -advantages * dual_clip
        over = (advantages < 0) & (loss > bound)
        loss, clipped = torch.where(over, bound, loss), clipped | over
    return loss, clipped


def cispo(
    logprobs: Tensor, proximal: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return -A clip(r, 1 - low, 1 + high) log policy, and where r is clipped.

    The clipped ratio is a constant, so every token keeps a gradient.
    """
    ratio = probability_ratio(logprobs.detach() - proximal)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -advantages * weight * logprobs, weight != ratio


def sapo(log_ratio: Tensor, advantages: Tensor, temperatures: Range) -> tuple[Tensor, Tensor]:
    """Return -A sigmoid(t (r - 1)) 4 / t, where t depends on the sign of A. Nothing is clipped.

    The gradient fades out smoothly away from r = 1.
    """
    positive, negative = temperatures
    t = torch.where(advantages > 0, torch.full_like(advantages, positive), negative)
    loss = -advantages * torch.sigmoid(t * (probability_ratio(log_ratio) - 1)) * 4 / t
    return loss, torch.zeros_like(advantages, dtype=torch.bool)


def policy_gradient(logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return -A log policy. There is no ratio, so nothing is clipped."""
    return -advantages * logprobs, torch.zeros_like(advantages, dtype=torch.bool)


def objective(
    logprobs: Tensor, proximal: Tensor, advantages: Tensor, rows: Tensor, s: AlgorithmSettings
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token for the selected objective, and where it is clipped."""
    if isinstance(s.loss, Plugin):
        return custom_loss(s.loss, logprobs, proximal, advantages, rows, s)
    log_ratio = logprobs - proximal
    match s.loss:
        case "clip":
            return clipped_objective(log_ratio, advantages, s.clip_low, s.clip_high, s.dual_clip)
        case "sequence_clip":
            # GSPO-token: the value is the geometric mean ratio of the completion, the gradient is
            # that of the token alone. So each token keeps its own advantage and weight.
            sequence = row_mean(log_ratio.detach(), rows) + (logprobs - logprobs.detach())
            return clipped_objective(sequence, advantages, s.clip_low, s.clip_high)
        case "cispo":
            return cispo(logprobs, proximal, advantages, s.clip_low, s.clip_high)
        case "sapo":
            return sapo(log_ratio, advantages, s.sapo_temperatures)
        case "pg":
            return policy_gradient(logprobs, advantages)
