"""Whole runs of the tiny model in environments of other libraries."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.audits import assert_consistent
from tests.small_runs import steps_of

SMALL = """
steps = 2
groups_per_step = 2
group_size = 4
save_samples = 8
[data]
max_prompt_length = 512
[rollout]
max_response_length = 8
environment = "{name}"
[rollout.environment_args]
{arguments}
[evaluation]
every = 1
limit = 2
[placement]
threads = 1
"""


@pytest.mark.parametrize(
    ("name", "arguments", "turns"),
    [
        ("verifiers:echo-environment", "turns = 2", 2),
        ("reasoning-gym:leg_counting", "size = 8\nmax_animals = 3", 1),
    ],
)
def test_run_trains_in_environment_by_name(
    name: str, arguments: str, turns: int, model: str, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'model = "{model}"\n' + SMALL.format(name=name, arguments=arguments))
    run = tmp_path / "run"
    command = [sys.executable, "-m", "paceline", "train", str(recipe), f"run_dir={run}"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_consistent(run)
    assert len(steps_of(run)) == 2
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    found = [len(c.get("turns", [0])) for sample in samples for c in sample["completions"]]
    assert max(found) <= turns
    evaluations = (run / "evaluations.jsonl").read_text().splitlines()
    assert len(evaluations) >= 2 and json.loads(evaluations[0])["prompts"] <= 2
