"""Training from a Python program that supplies the reward, the agent loop and the observer."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from examples.custom_environment import TwoTries
from examples.custom_program import StepPrinter, score
from paceline.config import load_config
from paceline.run import train
from tests.models import random_model

README = Path(__file__).parents[2] / "README.md"
SMALL = [
    "steps=2",
    "groups_per_step=2",
    "group_size=2",
    "rollout.max_response_length=4",
    "placement.threads=1",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_model(tmp_path_factory.mktemp("model"))


def test_train_uses_reward_environment_and_observer_of_program(model: str, tmp_path: Path) -> None:
    data = ["data.task=copy:3", "data.max_prompt_length=64"]
    config = load_config(None, [f"model={model}", f"run_dir={tmp_path}", *data, *SMALL])
    steps: list[int] = []

    class Counter(StepPrinter):
        def step_done(self, step: int, metrics: dict[str, float], groups: object) -> None:
            super().step_done(step, metrics, groups)
            steps.append(step)

    summary = asyncio.run(train(config, lambda _: Counter(), reward=score, environment=TwoTries))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert summary["steps"] == 2 and steps == [1, 2]
    assert all(row["reward_component/correct"] == 0.0 for row in rows)
    assert all(row["rollout/length_mean"] == 8 for row in rows), "two tries of four tokens each"
    assert max(row["train/logprob_diff_max"] for row in rows) < 1e-3, "contexts differ"


def test_readme_program_trains(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r"```python\n(import asyncio\n.*?)```", README.read_text(), re.DOTALL)
    assert found
    program = found[1].replace("Qwen/Qwen2.5-0.5B-Instruct", model)
    program = program.replace("*fully_async]", f"*fully_async, *{SMALL!r}]")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "say 1", "answer": "1"}\n')
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(program, names)
    assert names["summary"]["steps"] == 2
