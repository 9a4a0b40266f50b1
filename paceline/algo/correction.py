"""Off-policy correction: three policies meet in a token, and their two ratios mean different things.

    sampler    the engine that drew the token, with the weights of the token's version   (log-probs came with it)
    proximal   the trainer's own policy at the start of the step                         (recomputed, or guessed)
    current    the policy being trained

current / proximal is what clips hold near 1. proximal / sampler is the weight that makes stale tokens count as if drawn by the
proximal policy; here it is computed and kept in bounds. For a token of the newest version that weight is the mismatch of
two implementations of the same policy; for an older one it is mostly staleness. The two are measured apart.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.algo.kl import k3
from paceline.algo.ratio import probability_ratio
from paceline.algo.rows import row_mean, row_sum
from paceline.algo.settings import AlgorithmSettings

FAR = 0.2  # a distance of log-probs of the same version that only low precision explains
MISMATCH = ("logprob_diff_mean", "logprob_diff_max", "mismatch_outlier_fraction")


@dataclass(frozen=True, slots=True)
class Weights:
    """What each token's advantage is multiplied by, and why it is not simply the ratio. Each [M]."""

    values: Tensor
    masked: Tensor  # set to 0
    truncated: Tensor  # moved to a bound


def interpolated(current: Tensor, sampler: Tensor, versions: Tensor, step: int) -> Tensor:
    """A guess at the proximal log-probs without a forward pass: on the line from the sampler (version v) to the policy this step
    is making (version step + 1), where version `step` lies. Fresh tokens get the sampler's own.

    After A-3PO: Accelerating Asynchronous LLM Training with Staleness-aware Proximal Policy Approximation. Li et al., 2025,
    arXiv:2512.06547.
    """
    staleness = (step - versions).clamp(min=0).to(sampler.dtype)
    return sampler + staleness / (staleness + 1) * (current.detach() - sampler)


def second_moment_kept(log_weight: Tensor, threshold: float) -> Tensor:
    """M2PO: drop the largest squared log-weights until the mean of those kept is at most the threshold.

    (Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs? Zheng et al., 2025, arXiv:2510.01161.)
    """
    ordered, order = log_weight.double().square().sort()
    mean_of_smallest = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    kept = torch.zeros_like(order, dtype=torch.bool)
    kept[order] = mean_of_smallest <= threshold
    return kept


def importance_weights(log_weight: Tensor, rows: Tensor, s: AlgorithmSettings) -> Weights:
    """From log(proximal / sampler) of trained tokens to the weights the settings ask for."""
    sequence = s.correction_level == "sequence"
    ratio = probability_ratio(row_sum(log_weight, rows) if sequence else log_weight)
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    values, masked, truncated = ratio, nowhere, nowhere
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
    if s.reject_range is not None:
        mean = probability_ratio(row_mean(log_weight, rows))
        masked = masked | (mean < s.reject_range[0]) | (mean > s.reject_range[1])
    return Weights(torch.where(masked, 0.0, values), masked, truncated & ~masked)


Measures = dict[str, Tensor]


def fresh_tokens(versions: Tensor, rows: Tensor, step: int) -> Tensor:
    """[M] which tokens are of the trainer's version, as are all of their answer. After a swap of weights in mid-answer the keys and values
    of older tokens stay, so what follows them is of no single version, and its distance says nothing about the weights."""
    return row_sum((versions != step).to(torch.float32), rows) == 0


def off_policy_measures(log_ratio: Tensor, fresh: Tensor) -> tuple[Measures, Measures]:
    """Sums and maxima of log(trainer / sampler), apart for tokens of the newest version (mismatch) and others (staleness)."""
    ratio, gap = probability_ratio(log_ratio), log_ratio.abs()
    distance = k3(torch.zeros_like(log_ratio), log_ratio)
    sums: Measures = {
        "logprob_diff_mean": torch.where(fresh, gap, 0.0).sum(),
        "mismatch_outlier_fraction": (fresh & (gap > FAR)).sum(),
        "staleness_diff_mean": torch.where(fresh, 0.0, gap).sum(),
    }
    maxima: Measures = {"logprob_diff_max": torch.where(fresh, gap, 0.0).max()}
    for kind, where in (("mismatch", fresh), ("staleness", ~fresh)):
        sums[f"{kind}_fraction"] = where.sum()
        sums[f"{kind}_kl"] = torch.where(where, distance, 0.0).sum()
        sums[f"{kind}_ratio_mean"] = torch.where(where, ratio, 0.0).sum()
        maxima[f"{kind}_ratio_max"] = torch.where(where, ratio, 0.0).max()
    return sums, maxima


def named_measures(measures: dict[str, float]) -> dict[str, float]:
    """Means over the tokens of each kind, from sums divided by the number of all; a kind that is not there is left out."""
    result = {"stale_fraction": measures["staleness_fraction"]}
    for kind, more in (("mismatch", MISMATCH), ("staleness", ("staleness_diff_mean",))):
        share = measures[f"{kind}_fraction"]
        if share > 0:
            for name in (f"{kind}_kl", f"{kind}_ratio_mean", f"{kind}_ratio_max", *more):
                result[name] = measures[name] if name.endswith("_max") else measures[name] / share
    return result
