"""Every algorithm preset learns a built-in task with each of three seeds."""

import asyncio
import json
from pathlib import Path

import pytest

from paceline.algo.presets import PRESETS
from paceline.config import load_config
from paceline.run import train

STEPS, LEVEL = 60, 0.65  # the reward of the initial model is about 0.3


@pytest.mark.slow
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
    asyncio.run(train(load_config(None, settings)))
    rewards = [
        json.loads(line)["reward/mean"]
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    shown = [round(reward, 2) for reward in rewards]
    assert rewards[0] < 0.5 and sum(rewards[-5:]) / 5 > LEVEL, shown
