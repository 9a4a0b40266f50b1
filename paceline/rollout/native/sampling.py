"""Drawing tokens with random numbers that are a hash of (seed, position, token id), so that a sequence's answer depends on
nothing but its own seed: not on the batch, not on being interrupted.

The draw is an exponential race (the Gumbel-max trick without the outer logarithm): with E = -log(1 - u) for a uniform u per
token, the token with the largest p / E is a sample of p.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 1 << 17  # logits worked on at a time, so that a large vocabulary stays in the cache
TOKENS = 0xD1B54A32D192ED03  # the "seed" of token ids: a real seed that hashed the same way would meet its own hash and cancel it
U_STEP = 2.0**-31 * (1 - 2.0**-20)  # keeps u strictly inside (0, 1), so that a token of probability 0 never wins
FIRST_LOOK = 1024  # tokens sorted for top-p before sorting the whole vocabulary


def row_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """64 well mixed bits per row (splitmix64)."""
    x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


class Sampler:
    def __init__(self, vocabulary: int, device: torch.device) -> None:
        ids = row_keys(np.full(vocabulary, TOKENS, np.uint64), np.arange(vocabulary)).astype(np.int32)
        self.ids = torch.from_numpy(ids).to(device)  # a hash of every token id
        self.block = max(1, BLOCK // vocabulary)

    @torch.inference_mode()
    def draw(
        self,
        logits: Tensor,
        keys: NDArray[np.int64],
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float32],
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """One token for each row of `logits`, and its log-probability under the final distribution. Overwrites `logits`."""
        greedy = temperature == 0
        heat = np.where(greedy, np.float32(1), temperature)
        tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        words = keys.view(np.int32).reshape(-1, 2)
        masks, multipliers = torch.from_numpy(words[:, :1]).to(logits.device), torch.from_numpy(words[:, 1:] | 1).to(logits.device)
        for start in range(0, len(logits), self.block):
            rows = slice(start, start + self.block)
            chosen, p = self._draw_block(
                logits[rows].float(), masks[rows], multipliers[rows], greedy[rows], heat[rows], top_k[rows], top_p[rows]
            )
            tokens[rows], logprobs[rows] = chosen, p.log_()
        both = torch.stack((tokens, logprobs.view(torch.int32))).cpu().numpy()  # one transfer for both
        return both[0], both[1].view(np.float32)

    def _draw_block(
        self,
        logits: Tensor,
        masks: Tensor,
        multipliers: Tensor,
        greedy: NDArray[np.bool_],
        heat: NDArray[np.float32],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float32],
    ) -> tuple[Tensor, Tensor]:
        if (heat != 1).any():
            logits.div_(torch.from_numpy(heat).to(logits.device).unsqueeze(1))
        p = torch.softmax(logits, -1)
        if top_k.any() or (top_p < 1).any():
            truncate(p, torch.from_numpy(top_k).to(p.device), torch.from_numpy(top_p).to(p.device))
        if greedy.all():
            chosen = logits.argmax(-1)
        else:
            race = torch.div(p, self._negative_exponentials(masks, multipliers)).argmin(-1)
            chosen = torch.where(torch.from_numpy(greedy).to(p.device), logits.argmax(-1), race) if greedy.any() else race
        return chosen, p.gather(1, chosen.unsqueeze(1)).squeeze(1)

    def _negative_exponentials(self, masks: Tensor, multipliers: Tensor) -> Tensor:
        """-E for each row and token: a 32-bit hash, then log(1 - u) with u as fine as 2^-31 near 0, where the race is decided."""
        x = (self.ids ^ masks).mul_(multipliers)
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
