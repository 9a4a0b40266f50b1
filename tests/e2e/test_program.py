"""A run inside a program: reward, agent loop and observer are the program's own."""

import asyncio
import json
from pathlib import Path

from examples.own_environment import TwoTries
from examples.own_program import Watch, score
from paceline.config import load_config
from paceline.run import train
from tests.models import random_model


def test_a_program_brings_its_own_reward_environment_and_observer(tmp_path: Path) -> None:
    settings = [
        f"model={random_model(tmp_path / 'model')}",
        f"run_dir={tmp_path / 'run'}",
        "data.task=copy:3",
        "data.max_prompt_length=64",
    ]
    settings += [
        "steps=2",
        "groups_per_step=2",
        "group_size=2",
        "rollout.max_response_length=4",
        "placement.threads=1",
    ]
    seen: list[int] = []

    class Seen(Watch):
        def step_done(self, step: int, metrics: dict[str, float], groups: object) -> None:
            super().step_done(step, metrics, groups)
            seen.append(step)

    summary = asyncio.run(
        train(
            load_config(None, settings),
            lambda first_step: Seen(),
            reward=score,
            environment=TwoTries,
        )
    )
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert (
        summary["steps"] == 2
        and seen == [1, 2]
        and all(row["reward_component/right"] == 0.0 for row in rows)
    )
    assert all(row["rollout/length_mean"] == 8 for row in rows), "two tries of four tokens each"
    assert max(row["train/logprob_diff_max"] for row in rows) < 1e-3, (
        "the trainer sees what the engine saw"
    )
