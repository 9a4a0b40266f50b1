"""Assembly of groups into a Batch.

Trajectories are concatenated in the order of admission, so a batch does not depend on timing.
"""

from collections.abc import Sequence

import numpy as np

from paceline.types import Batch, BoolArray, Finish, FloatArray, Group, IntArray, Trajectory


def assemble(groups: Sequence[Group]) -> Batch:
    groups = sorted(groups, key=lambda group: group.seq)
    owners = [number for number, group in enumerate(groups) for _ in group.trajectories]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rows = [_row(trajectory) for trajectory in trajectories]
    tokens, mask, logprobs, versions, token_rewards = (
        np.concatenate(part) for part in zip(*rows, strict=True)
    )
    baselines = [group.baseline for group in groups for _ in group.trajectories]
    return Batch(
        tokens=tokens,
        lengths=np.array([len(row[0]) for row in rows], np.int32),
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        rewards=np.array([trajectory.reward for trajectory in trajectories], np.float32),
        groups=np.array(owners, np.int32),
        truncated=np.array([t.turns[-1].completion.finish is Finish.LENGTH for t in trajectories]),
        token_rewards=token_rewards if token_rewards.any() else None,
        baselines=None if None in baselines else np.array(baselines, np.float32),
    )


def _row(trajectory: Trajectory) -> tuple[IntArray, BoolArray, FloatArray, IntArray, FloatArray]:
    """Return tokens, mask, log-probs, versions and token rewards of one trajectory.

    Prompt tokens, including those from the environment, are outside the mask.
    """
    tokens, mask, logprobs, versions, rewards = [], [], [], [], []
    for turn in trajectory.turns:
        prompt, completion = len(turn.prompt), len(turn.completion)
        tokens += [np.array(turn.prompt, np.int32), turn.completion.tokens]
        mask += [np.zeros(prompt, np.bool_), np.ones(completion, np.bool_)]
        logprobs += [np.zeros(prompt, np.float32), turn.completion.logprobs]
        versions += [np.full(prompt, -1, np.int32), turn.completion.versions]
        token_rewards = np.zeros(prompt + completion, np.float32)
        token_rewards[-1] = turn.reward
        rewards.append(token_rewards)
    return (
        np.concatenate(tokens),
        np.concatenate(mask),
        np.concatenate(logprobs),
        np.concatenate(versions),
        np.concatenate(rewards),
    )
