"""A run on hostile data: its output, logs and files show text as text, and no secret."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from tests.fault_report import Fault
from tests.models import random_model

ESCAPES = "[/x]\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
CANARY = "canary-5b1f8e0a7c"
REWARD = """
import os

def score(completion: str, row: dict) -> dict[str, float]:
    print("key", os.environ.get("SCORER_API_KEY", "hidden"), row["id"])
    if row["bad"]:
        raise ValueError(f"{row['id']} {os.environ.get('SCORER_API_KEY', 'hidden')}")
    return {"reward": len(completion), row["id"]: 1.0}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the run directory, and what the command printed to a terminal without Unicode."""
    folder = tmp_path_factory.mktemp("hostile")
    model = random_model(folder / "model")
    rows = [{"id": f"{ESCAPES}{i}", "prompt": f"a{ESCAPES}", "bad": i == 0} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    run_dir = folder / "a[/b]"
    settings = {
        "model": model,
        "run_dir": run_dir,
        "steps": 2,
        "groups_per_step": 4,
        "group_size": 2,
        "data.path": folder / "rows.jsonl",
        "data.max_prompt_length": 64,
        "reward.function": f"{folder}/reward.py:score",
        "rollout.max_response_length": 4,
        "rollout.max_failed_groups": 9,
        "placement.threads": 1,
    }
    secrets = {name: CANARY for name in ("SCORER_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")}
    result = subprocess.run(
        [sys.executable, "-m", "paceline", "train", "hybrid"]
        + [f"{name}={value}" for name, value in settings.items()],
        env=os.environ | secrets | {"LC_ALL": "C", "PYTHONUTF8": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = result.stdout.decode("ascii")
    assert result.returncode == 0, output
    return run_dir, output


def controls(text: str) -> list[str]:
    return re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


@pytest.mark.fault("G7", "terminal escapes in prompts, ids, rewards and their errors")
def test_output_and_log_show_hostile_text_as_text(run: tuple[Path, str], fault: Fault) -> None:
    run_dir, output = run
    assert "failed and is dropped: reward" in output
    assert "Run summary" in output and "a[/b]" in output and "Traceback" not in output
    log = (run_dir / "logs" / "main.log").read_text(encoding="utf-8")
    assert "[/x]\\u001b]0;owned" in log
    fault.fired()
    assert controls(output) == [] and controls(log) == []


@pytest.mark.fault("G1", "secrets in the environment of a run")
def test_secrets_of_environment_are_in_no_file_and_no_output(
    run: tuple[Path, str], fault: Fault
) -> None:
    run_dir, output = run
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    assert len(files) > 10 and CANARY not in output
    fault.fired()


def test_samples_command_shows_hostile_ids(run: tuple[Path, str]) -> None:
    result = CliRunner().invoke(app, ["samples", str(run[0])])
    assert result.exit_code == 0, result.output
    assert "[/x]\\u001b" in result.output and controls(result.output) == []


def test_finished_run_in_folder_with_markup_is_reported(run: tuple[Path, str]) -> None:
    for command in (["pause"], ["workers", "list"]):
        result = CliRunner().invoke(app, [*command, str(run[0])])
        assert result.exit_code == 2 and "a[/b]" in result.output.replace("\n", "")
