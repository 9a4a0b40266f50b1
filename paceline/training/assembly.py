"""Assembly of groups into a Batch.

Trajectories are concatenated in the order of admission, so a batch does not depend on timing.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.types import Batch, Finish, FloatArray, Group, IntArray, Trajectory, Turn


def assemble(groups: Sequence[Group]) -> Batch:
    groups = sorted(groups, key=lambda group: group.seq)
    owners = [number for number, group in enumerate(groups) for _ in group.trajectories]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    baselines = [group.baseline for group in groups for _ in group.trajectories]
    # Prompt tokens, including those from the environment, are outside the mask.
    lengths = np.array([(len(turn.prompt), len(turn.completion)) for turn in turns], np.int64)
    mask = np.repeat(np.tile([False, True], len(turns)), lengths.ravel())
    logprobs, versions = np.zeros(len(mask), np.float32), np.full(len(mask), -1, np.int32)
    logprobs[mask] = np.concatenate([turn.completion.logprobs for turn in turns])
    versions[mask] = np.concatenate([turn.completion.versions for turn in turns])
    return Batch(
        tokens=np.concatenate([tokens for turn in turns for tokens in _tokens(turn)]),
        lengths=np.array([_length(trajectory) for trajectory in trajectories], np.int32),
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        rewards=np.array([trajectory.reward for trajectory in trajectories], np.float32),
        groups=np.array(owners, np.int32),
        truncated=np.array([t.turns[-1].completion.finish is Finish.LENGTH for t in trajectories]),
        token_rewards=_token_rewards(turns, np.cumsum(lengths.sum(axis=1))),
        baselines=None if None in baselines else np.array(baselines, np.float32),
    )


def _tokens(turn: Turn) -> tuple[IntArray, IntArray]:
    return np.array(turn.prompt, np.int32), turn.completion.tokens


def _length(trajectory: Trajectory) -> int:
    return sum(len(turn.prompt) + len(turn.completion) for turn in trajectory.turns)


def _token_rewards(turns: Sequence[Turn], ends: NDArray[np.int64]) -> FloatArray | None:
    """Return the rewards of the turns, each at its last token; None if there are none."""
    if not any(turn.reward for turn in turns):
        return None
    rewards = np.zeros(ends[-1], np.float32)
    rewards[ends - 1] = [turn.reward for turn in turns]
    return rewards
