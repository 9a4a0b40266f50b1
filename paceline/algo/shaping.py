"""Reward shaping before advantages: truncated and over-long completions, and the KL penalty."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.algo.joined_rows import apart, joined
from paceline.algo.kl import kl_estimate
from paceline.algo.settings import AlgorithmSettings, Estimator
from paceline.errors import ConfigError
from paceline.types import Batch


def last_turn_lengths(batch: Batch) -> NDArray[np.int64]:
    """Return the number of trained tokens in the last turn of each row: [R].

    The limit on the completion length applies to a turn.
    """
    offsets = batch.offsets
    lengths = np.zeros(batch.num_rows, np.int64)
    for row in range(batch.num_rows):
        trained = np.flatnonzero(batch.mask[offsets[row] : offsets[row + 1]])
        if len(trained):
            breaks = np.flatnonzero(np.diff(trained) > 1)
            lengths[row] = len(trained) - (breaks[-1] + 1 if len(breaks) else 0)
    return lengths


def overlong_penalty(
    lengths: NDArray[np.int64], max_length: int, buffer: int
) -> NDArray[np.float64]:
    """Return DAPO's soft penalty.

    It is 0 up to max_length - buffer and falls linearly to -1 at max_length.
    """
    return -np.clip((lengths - (max_length - buffer)) / buffer, 0.0, 1.0)


def without_truncated(batch: Batch) -> Batch:
    """Return the batch without trained tokens in truncated completions.

    Their rewards stay in the mean of their group.
    """
    if batch.truncated is None:
        return batch
    return replace(batch, mask=batch.mask & ~np.repeat(batch.truncated, batch.lengths))


def with_kl_in_reward(batch: Batch, coefficient: float, estimator: Estimator) -> Batch:
    """Subtract coefficient * KL from the reward of each trained token.

    With any `proximal`, this is the KL of the policy that sampled the token: a reward belongs to
    the token as sampled. Only for that policy is the estimate unbiased, and it does not need a
    forward pass of the actor before the advantages.
    """
    if batch.ref_logprobs is None:
        raise ConfigError(
            "kl_placement = 'reward' needs reference log-probs, but the batch has none: "
            "add a reference role"
        )
    kl = kl_estimate(
        torch.from_numpy(batch.logprobs), torch.from_numpy(batch.ref_logprobs), estimator
    ).numpy()
    penalty = np.where(batch.mask, coefficient * kl, 0.0)
    rewards = 0.0 if batch.token_rewards is None else batch.token_rewards
    return replace(batch, token_rewards=(rewards - penalty).astype(np.float32))


def shape_rewards(
    batch: Batch, s: AlgorithmSettings, max_length: int | None = None, kl_coef: float | None = None
) -> Batch:
    """Apply the selected shaping. An adapted `kl_coef` replaces that of the settings."""
    if (whole := joined(batch)) is not batch:
        return apart(shape_rewards(whole, s, max_length, kl_coef), batch)
    if s.overlong == "penalty":
        if max_length is None:
            raise ConfigError(
                "overlong = 'penalty' needs the maximum completion length, but max_length is None"
            )
        buffer = min(max_length, s.overlong_buffer or max(1, max_length // 5))
        penalty = overlong_penalty(last_turn_lengths(batch), max_length, buffer)
        batch = replace(batch, rewards=(batch.rewards + penalty).astype(np.float32))
    if s.overlong == "mask":
        batch = without_truncated(batch)
    coefficient = s.kl_coef if kl_coef is None else kl_coef
    if s.kl_placement == "reward" and coefficient > 0:
        batch = with_kl_in_reward(batch, coefficient, s.kl_estimator)
    return batch
