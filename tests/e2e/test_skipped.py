"""Runs with updates that are not finite: what is booked, saved, replayed and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from paceline.cli import app
from paceline.training.skipped import MAX_DUMPS, read_dump
from tests.e2e.test_extensions import run
from tests.fault_report import Fault
from tests.processes import children
from tests.small_runs import steps_of, weights

# The gradient of some batches overflows. Which ones depends only on their log-probs.
LOSSES = """
def sometimes(logprobs, proximal, advantages):
    factor = 1e30 if int(-1000 * float(logprobs.detach().sum())) % 2 == 0 else 1.0
    return -advantages * (logprobs - proximal).exp() * factor


def always(logprobs):
    return logprobs * 1e30
"""


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("losses") / "losses.py"
    path.write_text(LOSSES)
    return path


def paceline(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


@pytest.mark.fault("E1", "infinite loss in some updates, then the run is resumed")
def test_skipped_groups_agree_in_ledger_metrics_and_summary_after_resume(
    model: str, losses: Path, tmp_path: Path, fault: Fault
) -> None:
    settings = [f"algorithm.loss={losses}:sometimes", "save_every=2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    summary = run(model, whole, *settings, "steps=6")
    skipped = summary["ledger"]["dropped"]["update_skipped"]
    assert skipped >= 4, "no update was skipped"
    fault.fired()
    assert summary["ledger"]["trained"] == 6 * 4 == len(events(whole, "trained"))
    assert skipped == len(events(whole, "dropped")) == steps_of(whole)[-1]["train/skipped_groups"]
    assert [step["step"] for step in steps_of(whole)] == list(range(1, 7))
    assert all(step["train/updates_skipped"] == 0 for step in steps_of(whole))
    run(model, parts, *settings, "steps=3")
    resumed = run(model, parts, *settings, "steps=6")
    assert resumed["ledger"] == summary["ledger"]
    assert events(parts, "dropped") == events(whole, "dropped")
    assert weights(parts, 6) == weights(whole, 6)
    fault.audited(parts)


@pytest.mark.fault("E1", "infinite loss in every update of a run")
def test_run_stops_and_batch_can_be_replayed(
    model: str, losses: Path, tmp_path: Path, fault: Fault
) -> None:
    folder = tmp_path / "run"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'model = "{model}"\nrun_dir = "{folder}"\nsteps = 30\ngroups_per_step = 2\n'
        "group_size = 2\n[algorithm]\n"
        f'loss = "{losses}:always"\n[data]\ntask = "copy:3"\nlimit = 256\nmax_prompt_length = 32\n'
        "[rollout]\nmax_response_length = 4\n[placement]\nthreads = 1\n"
        f"[train]\nmax_skipped_updates = {MAX_DUMPS + 2}\n"
    )
    result = paceline("train", recipe)
    output = " ".join(result.output.split())
    assert result.exit_code == 14, result.output
    fault.fired()
    assert "12 updates in a row were skipped (train.max_skipped_updates = 12)" in output
    assert "only the gradient is not finite: it overflows" in output
    assert not children()
    assert len(events(folder, "dropped")) == 12 * 2 and not events(folder, "trained")
    dumps = sorted((folder / "skipped").iterdir())
    assert len(dumps) == MAX_DUMPS
    assert read_dump(dumps[0]).batch.num_rows == 4
    result = paceline("replay", dumps[0], "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output.splitlines()[-1])
    assert found["same_weights"] and found["step"] == 1
    update = found["result"]["updates"][0]
    assert update["loss"] < -1e28 and update["grad_norm"] != update["grad_norm"]
    assert [row["not finite"] for row in found["result"]["rows"]] == [["its gradient"]] * 4
    assert "4 of 4 rows are not finite" in paceline("replay", dumps[0], "--weights", model).output


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04broken"])
def test_replay_rejects_file_that_is_no_dump(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    result = paceline("replay", path)
    assert result.exit_code == 3 and "cannot be read" in result.output
