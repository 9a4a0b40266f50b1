"""Assembly of groups into a Batch.

Trajectories are concatenated in the order of admission, so a batch does not depend on timing. A
trajectory with turns that restart has several rows, which have its reward in common.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.types import Batch, Finish, FloatArray, Group, IntArray, Turn


def assemble(groups: Sequence[Group]) -> Batch:
    groups = sorted(groups, key=lambda group: group.seq)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rows = [row for trajectory in trajectories for row in trajectory.rows]
    # The trajectory of each row, by which values of trajectories become values of rows.
    owners = np.repeat(np.arange(len(trajectories)), [len(t.rows) for t in trajectories])
    turns = [turn for row in rows for turn in row]
    baselines = [group.baseline for group in groups for _ in group.trajectories]
    cut = [t.turns[-1].completion.finish is Finish.LENGTH for t in trajectories]
    # Prompt tokens, including those from the environment, are outside the mask.
    lengths = np.array([(len(turn.prompt), len(turn.completion)) for turn in turns], np.int64)
    mask = np.repeat(np.tile([False, True], len(turns)), lengths.ravel())
    logprobs, versions = np.zeros(len(mask), np.float32), np.full(len(mask), -1, np.int32)
    logprobs[mask] = np.concatenate([turn.completion.logprobs for turn in turns])
    versions[mask] = np.concatenate([turn.completion.versions for turn in turns])
    return Batch(
        tokens=np.concatenate([tokens for turn in turns for tokens in _tokens(turn)]),
        lengths=np.array([_length(row) for row in rows], np.int32),
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        rewards=np.array([t.reward for t in trajectories], np.float32)[owners],
        groups=_compared(groups)[owners],
        truncated=np.array(cut)[owners],
        token_rewards=_token_rewards(turns, np.cumsum(lengths.sum(axis=1))),
        baselines=None if None in baselines else np.array(baselines, np.float32)[owners],
        trajectories=owners.astype(np.int32) if len(rows) > len(trajectories) else None,
    )


def _compared(groups: Sequence[Group]) -> IntArray:
    """Return a number per trajectory, the same for trajectories of one agent at one prompt."""
    names = [
        (number, each.agent) for number, group in enumerate(groups) for each in group.trajectories
    ]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int32)


def _tokens(turn: Turn) -> tuple[IntArray, IntArray]:
    return np.array(turn.prompt, np.int32), turn.completion.tokens


def _length(row: Sequence[Turn]) -> int:
    return sum(len(turn.prompt) + len(turn.completion) for turn in row)


def _token_rewards(turns: Sequence[Turn], ends: NDArray[np.int64]) -> FloatArray | None:
    """Return the rewards of the turns, each at its last token; None if there are none."""
    if not any(turn.reward for turn in turns):
        return None
    rewards = np.zeros(ends[-1], np.float32)
    rewards[ends - 1] = [turn.reward for turn in turns]
    return rewards
