"""How much better than expected each answer, or each of its tokens, turned out to be.

Works in float64: with near-equal rewards in a group, float32 rounding divided by a tiny deviation would look like signal.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from paceline.algo.settings import AlgorithmSettings
from paceline.errors import ConfigError
from paceline.types import Batch, FloatArray

EPSILON = 1e-6  # keeps a group of equal rewards at advantage 0 instead of 0 / 0


def group_means(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Mean reward of each row's group and its size, both [R]."""
    _, index = torch.unique(groups, return_inverse=True)
    count = torch.bincount(index).to(rewards.dtype)
    total = torch.zeros_like(count).index_add_(0, index, rewards)
    return (total / count)[index], count[index]


def grpo(rewards: Tensor, groups: Tensor, normalize_std: bool = True) -> Tensor:
    """[R] reward minus the mean of its group, over the group's sample deviation. A group of one says nothing: 0."""
    mean, count = group_means(rewards, groups)
    centred = rewards - mean
    if not normalize_std:
        return centred
    mean_square, _ = group_means(centred.square(), groups)
    deviation = (mean_square * count / (count - 1).clamp(min=1)).sqrt()
    return centred / (deviation + EPSILON)


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """[R] reward minus the mean of the *other* attempts at the prompt. A group of one says nothing: 0."""
    mean, count = group_means(rewards, groups)
    return (rewards - mean) * count / (count - 1).clamp(min=1)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, [R, L], of rows whose reward [R] falls on the last trained token.

    Time runs over trained tokens only: what a tool or user said in between is part of the next state.
    """
    advantage, next_value = torch.zeros_like(rewards), torch.zeros_like(rewards)
    pending = rewards.clone()  # paid at the first trained token met from the right
    advantages = torch.zeros_like(values)
    for t in range(values.shape[1] - 1, -1, -1):
        here = mask[:, t]
        delta = pending + gamma * next_value - values[:, t]
        advantage = torch.where(here, delta + gamma * lam * advantage, advantage)
        advantages[:, t] = torch.where(here, advantage, 0.0)
        next_value = torch.where(here, values[:, t], next_value)
        pending = torch.where(here, 0.0, pending)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and deviation 1 over trained tokens."""
    trained = advantages[mask]
    return torch.where(mask, (advantages - trained.mean()) / (trained.std(correction=0) + EPSILON), 0.0)


def advantages(batch: Batch, settings: AlgorithmSettings, values: FloatArray | None = None) -> Batch:
    """The batch with `advantages` filled in, and with a critic also `returns` and `values`."""
    rewards = torch.from_numpy(batch.rewards).double()
    if settings.name == "ppo":
        return _with_critic(batch, settings, rewards, values)
    groups = torch.from_numpy(batch.groups)
    per_row = grpo(rewards, groups, settings.normalize_std) if settings.name == "grpo" else rloo(rewards, groups)
    per_token = np.repeat(per_row.numpy(), batch.lengths)
    return replace(batch, advantages=np.where(batch.mask, per_token, 0.0).astype(np.float32))


def _with_critic(batch: Batch, settings: AlgorithmSettings, rewards: Tensor, values: FloatArray | None) -> Batch:
    if values is None:
        raise ConfigError("algorithm 'ppo' needs the critic's values to compute advantages, but none were given: configure a critic")
    shape = (batch.num_rows, int(batch.lengths.max(initial=0)))
    inside = np.arange(shape[1])[None, :] < batch.lengths[:, None]  # flat order is row-major, so this both packs and unpacks
    padded_values, padded_mask = np.zeros(shape), np.zeros(shape, np.bool_)
    padded_values[inside], padded_mask[inside] = values, batch.mask
    mask = torch.from_numpy(padded_mask)
    advantage, returns = gae(rewards, torch.from_numpy(padded_values), mask, settings.gamma, settings.lam)
    if settings.normalize_std:
        advantage = whiten(advantage, mask)
    flat_advantage, flat_returns = (array.numpy()[inside].astype(np.float32) for array in (advantage, returns))
    return replace(batch, advantages=flat_advantage, returns=flat_returns, values=values)
