"""Groups in, one Batch out: attempts laid end to end, in the order of admission, so a batch does not depend on timing."""

from collections.abc import Sequence

import numpy as np

from paceline.types import Batch, Group, Trajectory


def assemble(groups: Sequence[Group]) -> Batch:
    tokens, lengths, mask, logprobs, versions, rewards, owners = [], [], [], [], [], [], []
    for number, group in enumerate(sorted(groups, key=lambda group: group.seq)):
        for trajectory in group.trajectories:
            assert trajectory.reward is not None, "only scored trajectories are trained"
            row = _row(trajectory)
            tokens.append(row[0])
            mask.append(row[1])
            logprobs.append(row[2])
            versions.append(row[3])
            lengths.append(len(row[0]))
            rewards.append(trajectory.reward)
            owners.append(number)
    return Batch(
        tokens=np.concatenate(tokens),
        lengths=np.array(lengths, np.int32),
        mask=np.concatenate(mask),
        logprobs=np.concatenate(logprobs),
        versions=np.concatenate(versions),
        rewards=np.array(rewards, np.float32),
        groups=np.array(owners, np.int32),
    )


def _row(trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, mask, log-probs and versions of one attempt; what the environment said is context, not trained on."""
    tokens, mask, logprobs, versions = [], [], [], []
    for turn in trajectory.turns:
        shown, said = len(turn.prompt), len(turn.completion)
        tokens += [np.array(turn.prompt, np.int32), turn.completion.tokens]
        mask += [np.zeros(shown, np.bool_), np.ones(said, np.bool_)]
        logprobs += [np.zeros(shown, np.float32), turn.completion.logprobs]
        versions += [np.full(shown, -1, np.int32), turn.completion.versions]
    return np.concatenate(tokens), np.concatenate(mask), np.concatenate(logprobs), np.concatenate(versions)
