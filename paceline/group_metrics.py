"""What the groups of a train step look like: rewards, lengths and truncated completions."""

from collections.abc import Sequence

import numpy as np

from paceline.algo.tolerance import uniform
from paceline.types import Batch, End, Finish, Group


def measure(groups: Sequence[Group], batch: Batch) -> dict[str, float]:
    """Return the metrics of the groups of a batch."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = np.array([trajectory.total_reward for trajectory in trajectories])
    cut = [t.turns[-1].completion.finish is Finish.LENGTH for t in trajectories]
    tokens = int(batch.mask.sum())
    parts = [trajectory.details for trajectory in trajectories]
    components = {
        f"reward_component/{name}": float(np.mean([part[name] for part in parts if name in part]))
        for name in set().union(*parts)
    }
    ends = [trajectory.end for trajectory in trajectories if trajectory.end is not None]
    episodes = {f"episode/end_{end}": ends.count(end) / len(ends) for end in End if ends}
    if ends:
        episodes["episode/turns_mean"] = float(np.mean([len(t.turns) for t in trajectories]))
    for name in sorted({trajectory.agent for trajectory in trajectories} - {""}):
        of_agent = [t.total_reward for t in trajectories if t.agent == name]
        components[f"reward_agent/{name}"] = float(np.mean(of_agent))
    splits = [len(trajectory.rows) - 1 for trajectory in trajectories]
    if ends or any(splits):
        episodes["episode/splits_mean"] = float(np.mean(splits))
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/uniform_group_fraction": sum(map(equal_rewards, groups)) / len(groups),
        **components,
        **episodes,
        "rollout/trajectories": float(len(trajectories)),
        "rollout/samples": float(batch.num_rows),
        "rollout/tokens": float(tokens),
        "rollout/length_mean": tokens / len(trajectories),
        "rollout/truncated_fraction": float(np.mean(cut)),
    }


def measure_staleness(
    groups: Sequence[Group], staleness: Sequence[int], taken_s: float
) -> dict[str, float]:
    """Return the metrics of the age of groups that were taken at this time."""
    return {
        "sample_age_s": float(np.mean([taken_s - group.started_s for group in groups])),
        "staleness/mean": float(np.mean(staleness)),
        "staleness/max": float(max(staleness)),
    }


def equal_rewards(group: Group) -> bool:
    """Return whether the rewards of every agent are equal, so that there is nothing to learn."""
    rewards: dict[str, list[float]] = {}
    for trajectory in group.trajectories:
        rewards.setdefault(trajectory.agent, []).append(trajectory.total_reward)
    return all(map(uniform, rewards.values()))
