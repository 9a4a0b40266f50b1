"""Drawing tokens with random numbers that are a hash of (seed, position, token id), so that a sequence's answer depends on
nothing but its own seed: not on the batch, not on being interrupted.

The draw is an exponential race (the Gumbel-max trick without the outer logarithm): with E = -log(1 - u) for a uniform u per
token, the token with the largest p / E is a sample of p. One number per row, looked up among summed probabilities, would be cheaper; but
sums of many probabilities that are off in their last bits hit another token far more often than a race has another winner.
"""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = (
    1 << 17
)  # logits worked on at a time on a CPU, so that a large vocabulary stays in the cache
TOKENS = 0xD1B54A32D192ED03  # the "seed" of token ids: a real seed that hashed the same way would meet its own hash and cancel it
U_STEP = 2.0**-31 * (
    1 - 2.0**-20
)  # keeps u strictly inside (0, 1), so that a token of probability 0 never wins
FIRST_LOOK = 1024  # tokens sorted for top-p before sorting the whole vocabulary


def row_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """64 well mixed bits per row (splitmix64)."""
    x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


@lru_cache(4)
def token_hashes(vocabulary: int, device: torch.device) -> Tensor:
    """32 well mixed bits per token id."""
    hashes = row_keys(np.full(vocabulary, TOKENS, np.uint64), np.arange(vocabulary)).astype(
        np.int32
    )
    return torch.from_numpy(hashes).to(device)


@torch.inference_mode()
def draw(
    logits: Tensor,
    keys: NDArray[np.int64],
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float32],
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """One token for each row of `logits`, and its log-probability under the final distribution. Overwrites `logits`."""
    block = max(1, BLOCK // logits.shape[1])
    if logits.device.type == "cpu" and len(logits) > block:
        parts = [slice(start, start + block) for start in range(0, len(logits), block)]
        drawn = [
            draw(logits[rows], keys[rows], temperature[rows], top_k[rows], top_p[rows])
            for rows in parts
        ]
        return np.concatenate([tokens for tokens, _ in drawn]), np.concatenate(
            [logprobs for _, logprobs in drawn]
        )
    device, greedy = logits.device, temperature == 0
    logits = logits.float()
    if (temperature != 1).any():
        logits.div_(
            torch.from_numpy(np.where(greedy, np.float32(1), temperature)).to(device).unsqueeze(1)
        )
    p = torch.softmax(logits, -1)
    if top_k.any() or (top_p < 1).any():
        truncate(p, torch.from_numpy(top_k).to(device), torch.from_numpy(top_p).to(device))
    if greedy.all():
        chosen = logits.argmax(-1, keepdim=True)
    else:
        chosen = torch.div(p, negative_exponentials(keys, p.shape[1], device)).argmin(
            -1, keepdim=True
        )
        if greedy.any():
            chosen = torch.where(
                torch.from_numpy(greedy).to(device).unsqueeze(1),
                logits.argmax(-1, keepdim=True),
                chosen,
            )
    logprobs = p.gather(1, chosen).log_()
    return chosen.squeeze(1).cpu().numpy().astype(np.int32), logprobs.squeeze(1).cpu().numpy()


def negative_exponentials(keys: NDArray[np.int64], vocabulary: int, device: torch.device) -> Tensor:
    """-E for each row and token: a 32-bit hash, then log(1 - u) with u as fine as 2^-31 near 0, where the race is decided."""
    words = torch.from_numpy(keys).to(device).view(torch.int32).view(-1, 2)
    x = (token_hashes(vocabulary, device) ^ words[:, :1]).mul_(words[:, 1:] | 1)
    x.bitwise_xor_(x >> 15).mul_(0x2C1B3C6D)
    u = x.bitwise_and_(0x7FFFFFFF).float()
    return u.mul_(-U_STEP).sub_(U_STEP / 4).log1p_()


def truncate(p: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Zero what top-k, then top-p leave out of each row of probabilities, and renormalise; tokens as likely as the last one
    kept are kept as well, so that nothing depends on the order of a sort."""
    widest = int(top_k.max())
    if widest > 0:
        width = min(widest, p.shape[1])
        least = p.topk(width).values.gather(1, top_k.clamp(1, width).sub(1).unsqueeze(1))
        _keep(p, least.masked_fill_(top_k.unsqueeze(1) <= 0, 0))
    if bool((top_p < 1).any()):
        for width in (min(FIRST_LOOK, p.shape[1]), p.shape[1]):
            ordered = p.topk(width).values
            before = ordered.cumsum(-1).sub_(ordered)  # mass of all likelier tokens
            if bool((before[:, -1] + ordered[:, -1] >= top_p.where(top_p < 1, 0)).all()):
                break
        outside = before >= top_p.unsqueeze(1)
        outside[:, 0] = False
        least = ordered.masked_fill_(outside, torch.inf).amin(-1, keepdim=True)
        _keep(p, least.masked_fill_(top_p.unsqueeze(1) >= 1, 0))


def _keep(p: Tensor, least: Tensor) -> None:
    p.masked_fill_(p < least, 0)
    p.div_(p.sum(-1, keepdim=True))
