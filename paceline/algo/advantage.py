"""Advantages: how much better than expected each completion, or each of its tokens, is.

Computed in float64. With nearly equal rewards in a group, float32 rounding divided by a tiny
standard deviation would look like signal.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.algo.custom import custom_advantage
from paceline.algo.joined_rows import apart, joined
from paceline.algo.settings import AlgorithmSettings
from paceline.algo.tolerance import uniform_groups
from paceline.errors import ConfigError
from paceline.plugins import Plugin
from paceline.types import Batch, FloatArray

EPSILON = 1e-6  # keeps a standard deviation of 0 from dividing by 0
# -- advantages per completion, for groups of any size


def group_sums(values: Tensor, groups: Tensor) -> Tensor:
    """Return the sum of each row's group: [R]."""
    _, index = torch.unique(groups, return_inverse=True)
    return torch.zeros_like(values).index_add(0, index, values)[index]


def group_means(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean reward of each row's group and the size of that group, both [R]."""
    count = group_sums(torch.ones_like(rewards), groups)
    return group_sums(rewards, groups) / count, count


def group_stds(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return the sample standard deviation of each row's group, 0 for a group of one: [R]."""
    mean, count = group_means(rewards, groups)
    return (group_sums((rewards - mean).square(), groups) / (count - 1).clamp(min=1)).sqrt()


def minus_group_mean(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return reward minus the mean of its group (GRPO, Dr.GRPO). A group of one gets 0."""
    return rewards - group_means(rewards, groups)[0]


def minus_mean_of_others(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return reward minus the mean of the group's *other* rewards (RLOO). A group of one gets 0."""
    mean, count = group_means(rewards, groups)
    return (rewards - mean) * count / (count - 1).clamp(min=1)


def minus_length_weighted_mean(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Return reward minus the length-weighted mean of its group (OPO).

    This baseline minimizes the variance of the gradient.
    """
    weights = lengths.to(rewards.dtype)
    total = group_sums(weights, groups).clamp(min=1)
    return rewards - group_sums(rewards * weights, groups) / total


# -- advantages per token


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    token_rewards: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, both [R, L].

    `rewards` [R] are paid at the last trained token, `token_rewards` [R, L] at their own. A reward
    at an untrained token belongs to the trained token before it. Time counts trained tokens only:
    tokens of a tool or user in between are part of the next state.
    """
    advantage, next_value = torch.zeros_like(rewards), torch.zeros_like(rewards)
    pending = rewards.clone()  # paid at the first trained token from the right
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
    """Shift and scale to mean 0 and standard deviation 1 over trained tokens."""
    trained = advantages[mask]
    if not len(trained):
        return torch.zeros_like(advantages)
    scaled = (advantages - trained.mean()) / (trained.std(correction=0) + EPSILON)
    return torch.where(mask, scaled, 0.0)


# -- advantages of a batch


def advantages(
    batch: Batch,
    settings: AlgorithmSettings,
    values: FloatArray | None = None,
    kl_coef: float | None = None,
) -> Batch:
    """Return the batch with its `advantages`, and with a critic also `returns` and `values`.

    An adapted `kl_coef` replaces that of the settings. A trajectory of several rows counts once.
    """
    if (whole := joined(batch)) is not batch:
        return apart(advantages(whole, settings, values, kl_coef), batch)
    if settings.needs_critic and values is None:
        raise ConfigError(
            "advantage = 'gae' needs the critic's values, but there are none: configure a critic"
        )
    returns = None
    if isinstance(settings.advantage, Plugin):
        custom = custom_advantage(settings.advantage, total_rewards(batch), batch, settings)
        per_token = torch.from_numpy(custom)
    elif settings.advantage in ("gae", "return"):
        per_token, returns = _token_advantages(batch, settings, values)
    elif not settings.uses_rewards:
        per_token = torch.zeros(batch.num_tokens, dtype=torch.float64)
    else:
        per_row = row_advantages(batch, settings).numpy()
        per_token = torch.from_numpy(np.where(batch.mask, np.repeat(per_row, batch.lengths), 0.0))
    if settings.kl_placement == "advantage" and settings.kl_coef > 0:
        coefficient = settings.kl_coef if kl_coef is None else kl_coef
        per_token = per_token - coefficient * torch.from_numpy(kl_of_tokens(batch))
    if settings.normalize == "batch":
        per_token = whiten(per_token, torch.from_numpy(batch.mask))
    batch = replace(batch, advantages=per_token.numpy().astype(np.float32))
    if values is None or returns is None:
        return batch
    return replace(batch, returns=returns.numpy().astype(np.float32), values=values)


def kl_of_tokens(batch: Batch) -> NDArray[np.float64]:
    """Return log sampler - log reference of each trained token, 0 of others: [T].

    Its mean estimates KL(sampler || reference) per token. As a negative advantage of the same token
    alone, it has the gradient of that KL at each position, for the prefixes that were sampled.
    """
    if batch.ref_logprobs is None:
        raise ConfigError(
            "kl_placement = 'advantage' needs reference log-probs, but the batch has none: "
            "add a reference role"
        )
    difference = batch.logprobs.astype(np.float64) - batch.ref_logprobs
    return np.where(batch.mask, difference, 0.0)


def total_rewards(batch: Batch) -> NDArray[np.float64]:
    """Return the reward of each completion, including those of its tokens: [R]."""
    total = batch.rewards.astype(np.float64)
    if batch.token_rewards is not None:
        row = np.repeat(np.arange(batch.num_rows), batch.lengths)
        total += np.bincount(row, batch.token_rewards.astype(np.float64), batch.num_rows)
    return total


def row_advantages(batch: Batch, settings: AlgorithmSettings) -> Tensor:
    """Return one advantage per completion, from its total reward: [R]."""
    rewards, groups = torch.from_numpy(total_rewards(batch)), torch.from_numpy(batch.groups)
    result: Tensor
    match settings.advantage:
        case "leave_one_out":
            result = minus_mean_of_others(rewards, groups)
        case "length_weighted":
            row = np.repeat(np.arange(batch.num_rows), batch.lengths)
            lengths = np.bincount(row, batch.mask, batch.num_rows)
            result = minus_length_weighted_mean(rewards, groups, torch.from_numpy(lengths))
        case "greedy":
            if batch.baselines is None:
                raise ConfigError(
                    "advantage = 'greedy' needs the reward of each prompt's greedy completion, "
                    "but the batch has none"
                )
            result = rewards - torch.from_numpy(batch.baselines)
        case _:
            result = minus_group_mean(rewards, groups)
    if settings.normalize == "group":
        result = result / (group_stds(rewards, groups) + EPSILON)
    if settings.compares_completions:
        result[torch.from_numpy(uniform_groups(rewards.numpy(), batch.groups))] = 0.0
    return result


def _token_advantages(
    batch: Batch, settings: AlgorithmSettings, values: FloatArray | None
) -> tuple[Tensor, Tensor]:
    """Return flat advantages and returns.

    Without a critic, the advantage is the discounted sum of future rewards.
    """
    # Other tokens change nothing, and joined rows repeat long contexts.
    kept = batch.mask if batch.token_rewards is None else batch.mask | (batch.token_rewards != 0)
    rows = np.repeat(np.arange(batch.num_rows), batch.lengths)
    lengths = np.bincount(rows[kept], minlength=batch.num_rows)
    # Row-major, so that indexing with it packs and unpacks the flat arrays.
    inside = np.arange(int(lengths.max(initial=0)))[None, :] < lengths[:, None]

    def padded(flat: NDArray[np.generic] | None, dtype: type) -> Tensor:
        result: NDArray[Any] = np.zeros(inside.shape, dtype)
        if flat is not None:
            result[inside] = flat[kept]
        return torch.from_numpy(result)

    advantage, returns = gae(
        torch.from_numpy(batch.rewards).double(),
        padded(values, np.float64),
        padded(batch.mask, np.bool_),
        settings.gamma,
        settings.lam,
        padded(batch.token_rewards, np.float64),
    )
    found = torch.zeros(2, batch.num_tokens, dtype=torch.float64)
    packed = torch.stack((advantage, returns))[:, torch.from_numpy(inside)]
    found[:, torch.from_numpy(kept)] = packed
    return found[0], found[1]
