"""Groups in, one Batch out: attempts laid end to end, in the order of admission, so a batch does not depend on timing."""

from collections.abc import Sequence

import numpy as np

from paceline.types import Batch, BoolArray, Finish, FloatArray, Group, IntArray, Trajectory


def assemble(groups: Sequence[Group]) -> Batch:
    groups = sorted(groups, key=lambda group: group.seq)
    owners = [number for number, group in enumerate(groups) for _ in group.trajectories]
    attempts = [trajectory for group in groups for trajectory in group.trajectories]
    rows = [_row(attempt) for attempt in attempts]
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
        rewards=np.array([attempt.reward for attempt in attempts], np.float32),
        groups=np.array(owners, np.int32),
        truncated=np.array(
            [attempt.turns[-1].completion.finish is Finish.LENGTH for attempt in attempts]
        ),
        token_rewards=token_rewards if token_rewards.any() else None,
        baselines=None if None in baselines else np.array(baselines, np.float32),
    )


def _row(trajectory: Trajectory) -> tuple[IntArray, BoolArray, FloatArray, IntArray, FloatArray]:
    """Tokens, mask, log-probs, versions and token rewards of one attempt; what the environment said is context, not trained on."""
    tokens, mask, logprobs, versions, rewards = [], [], [], [], []
    for turn in trajectory.turns:
        shown, said = len(turn.prompt), len(turn.completion)
        tokens += [np.array(turn.prompt, np.int32), turn.completion.tokens]
        mask += [np.zeros(shown, np.bool_), np.ones(said, np.bool_)]
        logprobs += [np.zeros(shown, np.float32), turn.completion.logprobs]
        versions += [np.full(shown, -1, np.int32), turn.completion.versions]
        paid = np.zeros(shown + said, np.float32)
        paid[-1] = turn.reward
        rewards.append(paid)
    return (
        np.concatenate(tokens),
        np.concatenate(mask),
        np.concatenate(logprobs),
        np.concatenate(versions),
        np.concatenate(rewards),
    )
