"""Off-policy correction: importance weights for stale tokens, and metrics of how stale they are.

Three policies are involved in each token:

    sampler    the engine that sampled the token, with the weights of the token's version
    proximal   the trainer's policy at the start of the step, recomputed or interpolated
    current    the policy being trained

Clips keep current / proximal near 1. The ratio proximal / sampler is an importance weight: it
makes stale tokens count as if the proximal policy had sampled them. This module computes and
bounds it. For tokens of the newest version, the weight measures the mismatch between two
implementations of one policy; for older tokens, mostly staleness. The metrics are separate.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.algo.custom import custom_weights
from paceline.algo.kl import k3
from paceline.algo.ratio import probability_ratio
from paceline.algo.rows import row_mean, row_sum
from paceline.algo.settings import AlgorithmSettings
from paceline.plugins import Plugin

# A difference of log-probs of the same version that only low precision explains.
OUTLIER_DIFF = 0.2
MISMATCH = ("logprob_diff_mean", "logprob_diff_max", "mismatch_outlier_fraction")
Measures = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Weights:
    """Factor of each token's advantage, and where it differs from the plain ratio. Each [M]."""

    values: Tensor
    masked: Tensor  # set to 0
    truncated: Tensor  # moved to a bound


def interpolated(current: Tensor, sampler: Tensor, versions: Tensor, step: int) -> Tensor:
    """Approximate the proximal log-probs without a forward pass.

    Version `step` lies on the line from the sampler (version v) to the policy that this step
    produces (version step + 1). For fresh tokens the result is the sampler's log-prob.

    After A-3PO: Accelerating Asynchronous LLM Training with Staleness-aware Proximal Policy
    Approximation. Li et al., 2025, arXiv:2512.06547.
    """
    staleness = (step - versions).clamp(min=0).to(sampler.dtype)
    return sampler + staleness / (staleness + 1) * (current.detach() - sampler)


def second_moment_kept(log_weight: Tensor, threshold: float) -> Tensor:
    """Return which tokens M2PO keeps.

    It drops the largest squared log-weights until the mean of the rest is at most the threshold.

    Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs? Zheng et
    al., 2025, arXiv:2510.01161.
    """
    ordered, order = log_weight.double().square().sort()
    mean_of_smallest = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    kept = torch.zeros_like(order, dtype=torch.bool)
    kept[order] = mean_of_smallest <= threshold
    return kept


def importance_weights(log_weight: Tensor, rows: Tensor, s: AlgorithmSettings) -> Weights:
    """Return the weights that the settings select, from log(proximal / sampler)."""
    sequence = s.correction_level == "sequence"
    ratio = probability_ratio(row_sum(log_weight, rows) if sequence else log_weight)
    none = torch.zeros_like(ratio, dtype=torch.bool)
    values, masked, truncated = ratio, none, none
    low, high = s.correction_range or (0.0, 0.0)
    match s.correction:
        case "none":
            values = torch.ones_like(ratio)
        case "truncate":
            values = ratio.clamp(low, high)
            truncated = values != ratio
        case "mask" | "icepop":
            masked = (ratio < low) | (ratio > high)
        case "m2po":
            masked = ~second_moment_kept(log_weight, s.m2_threshold)
        case Plugin():
            values = custom_weights(s.correction, log_weight, rows, s)
            masked, truncated = values == 0, ~torch.isclose(values, ratio)
    if s.reject_range is not None:
        mean = probability_ratio(row_mean(log_weight, rows))
        masked = masked | (mean < s.reject_range[0]) | (mean > s.reject_range[1])
    return Weights(torch.where(masked, 0.0, values), masked, truncated & ~masked)


def fresh_tokens(versions: Tensor, rows: Tensor, step: int) -> Tensor:
    """Return which tokens are fresh: their whole completion has the trainer's version. [M]

    After a weight swap within a completion, the KV cache of older tokens stays. The later tokens
    then have no single version, and their log-prob difference does not measure mismatch.
    """
    return row_sum((versions != step).to(torch.float32), rows) == 0


def off_policy_measures(log_ratio: Tensor, fresh: Tensor) -> tuple[Measures, Measures]:
    """Return sums and maxima of log(trainer / sampler).

    Fresh tokens (mismatch) and others (staleness) are measured separately.
    """
    ratio, difference = probability_ratio(log_ratio), log_ratio.abs()
    kl = k3(torch.zeros_like(log_ratio), log_ratio)
    sums: Measures = {
        "logprob_diff_mean": torch.where(fresh, difference, 0.0).sum(),
        "mismatch_outlier_fraction": (fresh & (difference > OUTLIER_DIFF)).sum(),
        "staleness_diff_mean": torch.where(fresh, 0.0, difference).sum(),
    }
    maxima: Measures = {"logprob_diff_max": torch.where(fresh, difference, 0.0).max()}
    for kind, where in (("mismatch", fresh), ("staleness", ~fresh)):
        sums[f"{kind}_fraction"] = where.sum()
        sums[f"{kind}_kl"] = torch.where(where, kl, 0.0).sum()
        sums[f"{kind}_ratio_mean"] = torch.where(where, ratio, 0.0).sum()
        maxima[f"{kind}_ratio_max"] = torch.where(where, ratio, 0.0).max()
    return sums, maxima


def named_measures(measures: dict[str, float]) -> dict[str, float]:
    """Return means over the tokens of each kind, from sums divided by the number of all tokens.

    A kind without tokens is left out.
    """
    result = {"stale_fraction": measures["staleness_fraction"]}
    for kind, more in (("mismatch", MISMATCH), ("staleness", ("staleness_diff_mean",))):
        fraction = measures[f"{kind}_fraction"]
        if fraction > 0:
            for name in (f"{kind}_kl", f"{kind}_ratio_mean", f"{kind}_ratio_max", *more):
                value = measures[name]
                result[name] = value if name.endswith("_max") else value / fraction
    return result
