"""Custom off-policy correction: truncated importance weights with mean 1.

paceline train recipes/fully_async.toml algorithm.correction=examples/custom_correction.py:mean_one
"""

from torch import Tensor


def mean_one(log_weight: Tensor) -> Tensor:
    """Return the factor of each token's advantage, from log(trainer / sampler)."""
    weights = log_weight.exp().clamp(max=2.0)
    return weights / weights.mean()
