"""Probability ratios from log-ratios, bounded so that ratios and gradients do not overflow."""

from torch import Tensor

LARGEST_LOG = 20.0  # e^20 = 5e8; float32 overflows at e^88.7, where gradients become NaN


def probability_ratio(log_ratio: Tensor) -> Tensor:
    """Return e^log_ratio with log_ratio clamped to +-LARGEST_LOG; the gradient outside is 0."""
    return log_ratio.clamp(-LARGEST_LOG, LARGEST_LOG).exp()
