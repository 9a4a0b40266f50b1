"""Every algorithm preset learns a built-in task with each of three seeds."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.algo.presets import PRESETS
from paceline.config import load_config
from paceline.loop import Metrics
from paceline.run import train

STEPS, LEVEL = 60, 0.65  # the reward of the initial model is about 0.3
LAST = 10  # steps whose mean reward counts


class Rewards:
    """Observer that stops the run once the last steps have the expected reward."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.seen: list[float] = []

    @property
    def last(self) -> float:
        return sum(self.seen[-LAST:]) / LAST

    def step_done(self, step: int, metrics: Metrics, groups: Sequence[Any]) -> None:
        self.seen.append(metrics["reward/mean"])
        if self.last > LEVEL:
            self.stop.set()

    def engines_polled(self, *_: object) -> None:
        return


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("preset", PRESETS)
def test_preset_raises_reward(preset: str, seed: int, tmp_path: Path) -> None:
    teacher = ["algorithm.teacher=tiny-teacher"] if preset == "distill" else []
    settings = [
        f"algorithm.name={preset}",
        *teacher,
        f"seed={seed}",
        f"steps={STEPS}",
        f"run_dir={tmp_path}",
        "data.task=reverse:5",
        "data.max_prompt_length=32",
        "rollout.max_response_length=8",
        "rollout.slots=128",
        "train.learning_rate=4e-4",
        "save_every=0",
        "placement.threads=1",  # two tests run at a time
    ]
    rewards = Rewards()
    asyncio.run(train(load_config(None, settings), lambda _: rewards, stop=rewards.stop))
    shown = [round(reward, 2) for reward in rewards.seen]
    assert rewards.seen[0] < 0.5 and rewards.last > LEVEL, shown
