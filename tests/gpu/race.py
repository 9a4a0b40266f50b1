"""What the sampling kernels compute, in plain torch: the token with the largest p / E wins, E exponential from a hash of seed, position and
token id. In place of the CPU's way to draw it makes the two engines' answers comparable token by token."""

import numpy as np
import torch

from paceline.rollout.native.sampling import token_hashes, truncate

U_STEP = 2.0**-31 * (1 - 2.0**-20)  # keeps u strictly inside (0, 1)


@torch.inference_mode()
def draw_by_race(
    logits: torch.Tensor, keys: np.ndarray, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    greedy = torch.from_numpy(temperature == 0)
    logits = logits / torch.from_numpy(np.where(temperature == 0, np.float32(1), temperature)).unsqueeze(1)
    p = torch.softmax(logits, -1)
    truncate(p, torch.from_numpy(top_k), torch.from_numpy(top_p))
    race = (p / exponentials(keys, p.shape[1])).argmax(-1)
    chosen = torch.where(greedy, logits.argmax(-1), race)
    logprobs = p.gather(1, chosen.unsqueeze(1)).squeeze(1).log()
    return chosen.numpy().astype(np.int32), logprobs.numpy()


def exponentials(keys: np.ndarray, vocabulary: int) -> torch.Tensor:
    words = torch.from_numpy(keys).view(torch.int32).view(-1, 2)
    x = (torch.from_numpy(token_hashes(vocabulary)) ^ words[:, :1]) * (words[:, 1:] | 1)
    x = (x ^ (x >> 15)) * 0x2C1B3C6D
    u = (x & 0x7FFFFFFF).float()
    return -(u * -U_STEP - U_STEP / 4).log1p()
