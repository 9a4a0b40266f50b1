"""How much better than expected each answer, or each of its tokens, turned out to be.

Works in float64: with near-equal rewards in a group, float32 rounding divided by a tiny deviation would look like signal.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.algo.settings import AlgorithmSettings
from paceline.errors import ConfigError
from paceline.types import Batch, FloatArray

EPSILON = 1e-6  # keeps a standard deviation of 0 from dividing by 0
TOLERANCE = 1e-6  # rewards closer than this are equal: they differ by rounding (0.1 + 0.2 and 0.3)


def uniform(rewards: Sequence[float] | NDArray[np.floating]) -> bool:
    """Return whether all rewards of a group are equal, up to rounding."""
    return float(np.ptp(rewards)) <= TOLERANCE * max(1.0, float(np.abs(rewards).max()))


# -- one number per answer; groups may be of any size


def group_sums(values: Tensor, groups: Tensor) -> Tensor:
    """[R] the sum of each row's group."""
    _, index = torch.unique(groups, return_inverse=True)
    return torch.zeros_like(values).index_add(0, index, values)[index]


def group_means(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Mean reward of each row's group and its size, both [R]."""
    count = group_sums(torch.ones_like(rewards), groups)
    return group_sums(rewards, groups) / count, count


def group_deviations(rewards: Tensor, groups: Tensor) -> Tensor:
    """[R] sample deviation of each row's group; 0 in a group of one."""
    mean, count = group_means(rewards, groups)
    return (group_sums((rewards - mean).square(), groups) / (count - 1).clamp(min=1)).sqrt()


def above_group(rewards: Tensor, groups: Tensor) -> Tensor:
    """GRPO, Dr.GRPO: reward minus the mean of its group. A group of one says nothing: 0."""
    return rewards - group_means(rewards, groups)[0]


def above_others(rewards: Tensor, groups: Tensor) -> Tensor:
    """RLOO: reward minus the mean of the *other* attempts at the prompt. A group of one says nothing: 0."""
    mean, count = group_means(rewards, groups)
    return (rewards - mean) * count / (count - 1).clamp(min=1)


def above_length_weighted(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """OPO: reward minus the group's mean weighted by length, which makes the gradient's variance least."""
    weights = lengths.to(rewards.dtype)
    return rewards - group_sums(rewards * weights, groups) / group_sums(weights, groups).clamp(
        min=1
    )


# -- one number per token


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    token_rewards: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, [R, L]. `rewards` [R] fall on the last trained token, `token_rewards` [R, L] where they are; one on
    an untrained token goes to the trained one before it.

    Time runs over trained tokens only: what a tool or user said in between is part of the next state.
    """
    advantage, next_value = torch.zeros_like(rewards), torch.zeros_like(rewards)
    pending = rewards.clone()  # paid at the first trained token met from the right
    advantages = torch.zeros_like(values)
    for t in range(values.shape[1] - 1, -1, -1):
        here = mask[:, t]
        if token_rewards is not None:
            pending = pending + token_rewards[:, t]
        delta = pending + gamma * next_value - values[:, t]
        advantage = torch.where(here, delta + gamma * lam * advantage, advantage)
        advantages[:, t] = torch.where(here, advantage, 0.0)
        next_value = torch.where(here, values[:, t], next_value)
        pending = torch.where(here, 0.0, pending)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and deviation 1 over trained tokens."""
    trained = advantages[mask]
    if not len(trained):
        return torch.zeros_like(advantages)
    return torch.where(
        mask, (advantages - trained.mean()) / (trained.std(correction=0) + EPSILON), 0.0
    )


# -- a whole batch


def advantages(
    batch: Batch, settings: AlgorithmSettings, values: FloatArray | None = None
) -> Batch:
    """The batch with `advantages` filled in, and with a critic also `returns` and `values`."""
    if settings.needs_critic and values is None:
        raise ConfigError(
            "advantage = 'gae' needs the critic's values to compute advantages, but none were given: configure a critic"
        )
    mask, returns = torch.from_numpy(batch.mask), None
    if settings.advantage in ("gae", "return"):
        per_token, returns = _token_by_token(batch, settings, values)
    else:
        per_row = row_advantages(batch, settings).numpy()
        per_token = torch.from_numpy(np.where(batch.mask, np.repeat(per_row, batch.lengths), 0.0))
    if settings.normalize == "batch":
        per_token = whiten(per_token, mask)
    filled = replace(batch, advantages=per_token.numpy().astype(np.float32))
    return (
        filled
        if values is None or returns is None
        else replace(filled, returns=returns.numpy().astype(np.float32), values=values)
    )


def row_advantages(batch: Batch, settings: AlgorithmSettings) -> Tensor:
    """[R] from the whole reward of each answer."""
    row = np.repeat(np.arange(batch.num_rows), batch.lengths)
    paid = (
        0.0
        if batch.token_rewards is None
        else np.bincount(row, batch.token_rewards.astype(np.float64), batch.num_rows)
    )
    rewards, groups = (
        torch.from_numpy(batch.rewards.astype(np.float64) + paid),
        torch.from_numpy(batch.groups),
    )
    result: Tensor
    match settings.advantage:
        case "leave_one_out":
            result = above_others(rewards, groups)
        case "length_weighted":
            lengths = np.bincount(row, batch.mask, batch.num_rows)
            result = above_length_weighted(rewards, groups, torch.from_numpy(lengths))
        case "greedy":
            if batch.baselines is None:
                raise ConfigError(
                    "advantage = 'greedy' needs the reward of each prompt's greedy answer, but the batch has none"
                )
            result = rewards - torch.from_numpy(batch.baselines)
        case _:
            result = above_group(rewards, groups)
    if settings.normalize == "group":
        result = result / (group_deviations(rewards, groups) + EPSILON)
    if settings.compares_attempts:
        for group in np.unique(batch.groups):
            members = groups == int(group)
            if uniform(rewards[members].numpy()):
                result[members] = 0.0
    return result


def _token_by_token(
    batch: Batch, settings: AlgorithmSettings, values: FloatArray | None
) -> tuple[Tensor, Tensor]:
    """Flat advantages and returns. Without a critic the advantage is the discounted reward still to come."""
    inside = (
        np.arange(int(batch.lengths.max(initial=0)))[None, :] < batch.lengths[:, None]
    )  # row-major, so it packs and unpacks

    def padded(flat: NDArray[np.generic] | None, dtype: type) -> Tensor:
        result: NDArray[Any] = np.zeros(inside.shape, dtype)
        if flat is not None:
            result[inside] = flat
        return torch.from_numpy(result)

    advantage, returns = gae(
        torch.from_numpy(batch.rewards).double(),
        padded(values, np.float64),
        padded(batch.mask, np.bool_),
        settings.gamma,
        settings.lam,
        padded(batch.token_rewards, np.float64),
    )
    return advantage[torch.from_numpy(inside)], returns[torch.from_numpy(inside)]
