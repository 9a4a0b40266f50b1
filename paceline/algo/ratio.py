"""Probability ratios from log-ratios, bounded so that neither a ratio nor its gradient overflows."""

from torch import Tensor

LARGEST_LOG = 20.0  # e^20 = 5e8; float32 overflows at e^88.7, where gradients become NaN


def probability_ratio(log_ratio: Tensor) -> Tensor:
    """Return e^log_ratio with the log-ratio clamped to +-LARGEST_LOG; the gradient beyond is 0."""
    return log_ratio.clamp(-LARGEST_LOG, LARGEST_LOG).exp()
