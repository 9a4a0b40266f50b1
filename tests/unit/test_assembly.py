"""Assembly of groups into a batch: masks, rewards, versions and baselines of rows."""

import numpy as np

from paceline.training.assembly import assemble
from paceline.types import Completion, Finish, Group, Prompt, Trajectory, Turn


def completion(*tokens: int, version: int = 0, finish: Finish = Finish.STOP) -> Completion:
    array = np.array(tokens, np.int32)
    return Completion(
        array, -array.astype(np.float32), np.full(len(tokens), version, np.int32), finish
    )


def group(seq: int, *trajectories: Trajectory, baseline: float | None = None) -> Group:
    return Group(seq, Prompt(f"p{seq}", (1, 2), "", {}), trajectories, 0.0, 0.0, baseline)


def test_trajectory_of_two_turns_is_one_row() -> None:
    turns = (
        Turn((1, 2), completion(3, 4, version=5), reward=0.5),
        Turn((6,), completion(7, version=6, finish=Finish.LENGTH), reward=0.25),
    )
    batch = assemble([group(0, Trajectory(turns, "", 1.0))])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 6, 7] and batch.lengths.tolist() == [6]
    assert batch.mask.tolist() == [False, False, True, True, False, True]
    assert batch.logprobs.tolist() == [0, 0, -3, -4, 0, -7]
    assert batch.versions.tolist() == [-1, -1, 5, 5, -1, 6]
    assert batch.token_rewards is not None and batch.truncated is not None
    assert batch.token_rewards.tolist() == [0, 0, 0, 0.5, 0, 0.25]
    assert batch.rewards.tolist() == [1.0] and batch.truncated.tolist() == [True]


def test_rows_are_in_order_of_admission_with_their_groups() -> None:
    one, two = (
        Trajectory((Turn((1, 2), completion(3)),), "", 0.0),
        Trajectory((Turn((1, 2), completion(4)),), "", 1.0),
    )
    batch = assemble([group(9, two, one), group(4, one, one, one)])
    assert batch.groups.tolist() == [0, 0, 0, 1, 1] and batch.rewards.tolist() == [0, 0, 0, 1, 0]
    assert batch.token_rewards is None and batch.baselines is None


def test_baseline_applies_to_every_trajectory_of_group() -> None:
    trajectory = Trajectory((Turn((1, 2), completion(3)),), "", 0.0)
    first = group(0, trajectory, trajectory, baseline=0.0)
    batch = assemble([first, group(1, trajectory, baseline=0.75)])
    assert batch.baselines is not None and batch.baselines.tolist() == [0.0, 0.0, 0.75]
