"""Rewards that agent programs return. Trajectories without one are scored by another reward."""

from collections.abc import Sequence

from paceline.errors import RewardError
from paceline.reward.reward import NoReward, Reward
from paceline.types import End, Prompt, Score, Trajectory


class ReturnedReward:
    def __init__(self, others: Reward) -> None:
        self._others = others

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        missing = [each for each in trajectories if each.reward is None]
        if isinstance(self._others, NoReward) and any(_ended(each) for each in missing):
            raise RewardError(
                f"prompt {prompt.uid!r}: the program of rollout.agent returned None; return a "
                "reward, or set reward.function, which scores the last completion"
            )
        scores = iter(await self._others.score(prompt, missing) if missing else ())
        return [
            next(scores) if each.reward is None else {"reward": each.reward, **each.details}
            for each in trajectories
        ]

    async def close(self) -> None:
        await self._others.close()


def _ended(trajectory: Trajectory) -> bool:
    """Return whether the program ended the episode itself and not a limit."""
    return trajectory.end not in (End.TURNS, End.CONTEXT)
