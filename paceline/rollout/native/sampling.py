"""Token sampling whose random numbers are a hash of (seed, position, token ID).

A completion therefore depends on its seed alone, not on batch composition or interruptions.

A token is sampled by an exponential race (the Gumbel-max trick without the outer logarithm): with
E = -log(1 - u) for a uniform u per token, the token with the largest p / E is a sample of p.
Inverting the cumulative distribution with one random number per row would be cheaper. But rounding
errors in the last bits of p would then change the sampled token far more often.
"""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 1 << 17  # logits processed at a time on a CPU, to fit a large vocabulary into its cache
# Seed of the hashes of token IDs. It is an arbitrary constant, because a request seed that equals
# it would cancel the hashes.
TOKEN_SEED = 0xD1B54A32D192ED03
# Keeps u strictly inside (0, 1), so that a token of probability 0 never wins.
U_STEP = 2.0**-31 * (1 - 2.0**-20)
FIRST_SORT = 1024  # tokens sorted for top-p before the whole vocabulary is sorted


def row_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a 64-bit hash per row (splitmix64)."""
    x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


@lru_cache(4)
def token_hashes(vocabulary: int, device: torch.device) -> Tensor:
    """Return a 32-bit hash per token ID."""
    seeds = np.full(vocabulary, TOKEN_SEED, np.uint64)
    hashes = row_keys(seeds, np.arange(vocabulary)).astype(np.int32)
    return torch.from_numpy(hashes).to(device)


@torch.inference_mode()
def sample(
    logits: Tensor,
    keys: NDArray[np.int64],
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float32],
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return one token per row of `logits` and its log-prob under the truncated distribution.

    Overwrites `logits`.
    """
    block = max(1, BLOCK // logits.shape[1])
    if logits.device.type == "cpu" and len(logits) > block:
        parts = [slice(start, start + block) for start in range(0, len(logits), block)]
        sampled = [
            sample(logits[rows], keys[rows], temperature[rows], top_k[rows], top_p[rows])
            for rows in parts
        ]
        tokens, logprobs = zip(*sampled, strict=True)
        return np.concatenate(tokens), np.concatenate(logprobs)
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
        chosen = _argmin(logits.neg_())
    else:
        chosen = _argmin(torch.div(p, negative_exponentials(keys, p.shape[1], device)))
        if greedy.any():
            rows = torch.from_numpy(greedy).to(device).unsqueeze(1)
            chosen = torch.where(rows, _argmin(logits.neg_()), chosen)
    chosen_logprobs = p.gather(1, chosen).log_().squeeze(1)
    return chosen.squeeze(1).cpu().numpy().astype(np.int32), chosen_logprobs.cpu().numpy()


def _argmin(values: Tensor) -> Tensor:
    """Return the index of the smallest value of each row: [n, 1]."""
    if values.device.type == "cpu":  # numpy is ten times faster with a large vocabulary
        return torch.from_numpy(values.numpy().argmin(-1)).unsqueeze(1)
    return values.argmin(-1, keepdim=True)


def negative_exponentials(keys: NDArray[np.int64], vocabulary: int, device: torch.device) -> Tensor:
    """Return -E for each row and token.

    A 32-bit hash gives u with a resolution of 2^-31 near 0, where the race is decided.
    """
    words = torch.from_numpy(keys).to(device).view(torch.int32).view(-1, 2)
    x = (token_hashes(vocabulary, device) ^ words[:, :1]).mul_(words[:, 1:] | 1)
    x.bitwise_xor_(x >> 15).mul_(0x2C1B3C6D)
    u = x.bitwise_and_(0x7FFFFFFF).float()
    return u.mul_(-U_STEP).sub_(U_STEP / 4).log1p_()


def truncate(p: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Apply top-k, then top-p to each row of probabilities and renormalize, in place.

    Tokens as likely as the last one kept are kept as well, so the sort order does not matter.
    """
    widest = int(top_k.max())
    if widest > 0:
        width = min(widest, p.shape[1])
        least = p.topk(width).values.gather(1, top_k.clamp(1, width).sub(1).unsqueeze(1))
        _keep(p, least.masked_fill_(top_k.unsqueeze(1) <= 0, 0))
    if bool((top_p < 1).any()):
        for width in (min(FIRST_SORT, p.shape[1]), p.shape[1]):
            ordered = p.topk(width).values
            before = ordered.cumsum(-1).sub_(ordered)  # total probability of the likelier tokens
            if bool((before[:, -1] + ordered[:, -1] >= top_p.where(top_p < 1, 0)).all()):
                break
        outside = before >= top_p.unsqueeze(1)
        outside[:, 0] = False
        least = ordered.masked_fill_(outside, torch.inf).amin(-1, keepdim=True)
        _keep(p, least.masked_fill_(top_p.unsqueeze(1) >= 1, 0))


def _keep(p: Tensor, least: Tensor) -> None:
    p.masked_fill_(p < least, 0)
    p.div_(p.sum(-1, keepdim=True))
