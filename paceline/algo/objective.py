"""Policy objectives: the loss of each trained token, and where a clip took its gradient away (or, in CISPO, cut its weight).

`anchor` is the policy that ratios are taken against, `advantages` already carry the off-policy weight of the token.
"""

import torch
from torch import Tensor

from paceline.algo.ratio import probability_ratio
from paceline.algo.rows import row_mean
from paceline.algo.settings import AlgorithmSettings, Range


def clipped_objective(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO: max(-A r, -A clip(r, 1 - low, 1 + high)); with a dual clip at most -A dual_clip where A < 0."""
    ratio = probability_ratio(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss, cut = torch.maximum(plain, clipped), clipped > plain
    if dual_clip is not None:
        bound = -advantages * dual_clip
        over = (advantages < 0) & (loss > bound)
        loss, cut = torch.where(over, bound, loss), cut | over
    return loss, cut


def cispo(
    logprobs: Tensor, anchor: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-A clip(r, 1 - low, 1 + high) log policy, with the clipped ratio as a constant: every token keeps a gradient."""
    ratio = probability_ratio(logprobs.detach() - anchor)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -advantages * weight * logprobs, weight != ratio


def sapo(log_ratio: Tensor, advantages: Tensor, temperatures: Range) -> tuple[Tensor, Tensor]:
    """-A sigmoid(t (r - 1)) 4 / t, with t by the sign of A: the gradient fades out smoothly away from r = 1."""
    positive, negative = temperatures
    t = torch.where(advantages > 0, torch.full_like(advantages, positive), negative)
    loss = -advantages * torch.sigmoid(t * (probability_ratio(log_ratio) - 1)) * 4 / t
    return loss, torch.zeros_like(advantages, dtype=torch.bool)


def policy_gradient(logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """-A log policy: no ratio, no clip."""
    return -advantages * logprobs, torch.zeros_like(advantages, dtype=torch.bool)


def objective(
    logprobs: Tensor, anchor: Tensor, advantages: Tensor, rows: Tensor, s: AlgorithmSettings
) -> tuple[Tensor, Tensor]:
    """The one the settings name."""
    log_ratio = logprobs - anchor
    match s.loss:
        case "clip":
            return clipped_objective(log_ratio, advantages, s.clip_low, s.clip_high, s.dual_clip)
        case "sequence_clip":
            # GSPO-token: the value is the completion's mean ratio, the gradient the token's own.
            sequence = row_mean(log_ratio.detach(), rows) + (logprobs - logprobs.detach())
            return clipped_objective(sequence, advantages, s.clip_low, s.clip_high)
        case "cispo":
            return cispo(logprobs, anchor, advantages, s.clip_low, s.clip_high)
        case "sapo":
            return sapo(log_ratio, advantages, s.sapo_temperatures)
        case "pg":
            return policy_gradient(logprobs, advantages)
