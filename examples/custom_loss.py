"""Custom loss: the clip of PPO. The mean over tokens, KL and entropy terms are added to it.

paceline train recipes/hybrid.toml algorithm.loss=examples/custom_loss.py:clip
"""

import torch
from torch import Tensor


def clip(logprobs: Tensor, proximal: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and which tokens are clipped (recorded in the metrics)."""
    ratio = (logprobs - proximal).exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
    return torch.maximum(plain, clipped), clipped > plain
