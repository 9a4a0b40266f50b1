"""Random log-probs of tokens, with ratios on both sides of every clip, and what belongs to them."""

import torch
from torch import Tensor

TOKENS = 40


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Return per-token values for losses. Advantages have both signs."""
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(TOKENS, generator=g, dtype=torch.float64) * scale

    old = -normal(1).abs() - 0.5
    return {
        "old": old,
        "new": old + normal(0.7),
        "advantages": normal(1),
        "entropy": normal(1).abs(),
        "ref": old + normal(0.3),
        "values": normal(1),
        "old_values": normal(1),
        "returns": normal(1),
        "weights": normal(1).abs(),
    }
