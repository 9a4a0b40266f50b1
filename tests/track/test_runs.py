"""A real run and its continuation, in two trackers at the same time."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config import load_config
from paceline.run import train
from tests.track.readers import READERS

SETTINGS = [
    "groups_per_step=2",
    "group_size=2",
    "data.task=copy:3",
    "data.limit=256",
    "rollout.max_response_length=8",
    "placement.threads=1",
    "data.max_prompt_length=32",
    "evaluation.task=copy:3",
    "evaluation.limit=2",
    "evaluation.every=1",
    'track=["tensorboard", "trackio"]',
]


def test_trackers_have_what_the_run_directory_has(model: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "continued"
    for steps in (2, 3):
        chosen = [f"model={model}", f"run_dir={run_dir}", *SETTINGS, f"steps={steps}"]
        asyncio.run(train(load_config(None, chosen)))
    rows = lines(run_dir / "metrics.jsonl")
    prompt = lines(run_dir / "samples.jsonl")[0]["prompt"]
    evaluations = lines(run_dir / "evaluations.jsonl")
    for name in ("tensorboard", "trackio"):
        stored = READERS[name](run_dir)
        assert [step for step, _ in stored.points["train/loss"]] == [1, 2, 3]
        for metric in ("reward/mean", "rollout/tokens"):
            expected = [row[metric] for row in rows]
            assert [value for _, value in stored.points[metric]] == pytest.approx(expected)
        steps_of = [value for _, value in stored.points["evaluation/step"]]
        assert steps_of == [line["step"] for line in evaluations]
        assert stored.settings["model"] == model
        assert prompt.split()[0] in stored.samples
        assert all(name in stored.summary for name in ("staleness_max", "ledger.issued"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
