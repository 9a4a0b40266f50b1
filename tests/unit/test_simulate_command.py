"""`paceline simulate` and `paceline plan --probe` on the command line."""

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.simulator.costs import read_costs

SMALL = ["steps=4", "groups_per_step=2", "group_size=2", "rollout.max_response_length=8"]


def run(*args: str) -> tuple[int, str]:
    found = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*args])
    return found.exit_code, found.output


def test_simulate_prints_every_mode_and_names_fastest() -> None:
    code, output = run("simulate", "recipes/fully_async.toml", *SMALL, "--devices", "4")
    assert code == 0, output
    for words in ("hybrid sync", "one step off", "fully async", "async in turns", "fastest: "):
        assert words in output
    assert "…" not in output, "the table must fit 80 columns"


def test_simulate_needs_no_recipe() -> None:
    code, output = run("simulate", "model=tiny", "data.task=reverse:5", *SMALL, "--json")
    assert code == 0, output
    assert json.loads(output)["modes"][0]["mode"] == "hybrid sync"


def test_simulate_reads_costs_and_lengths(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(
        '{"decode_step_s": 1, "decode_sequence_s": 0, "decode_context_s": 0, "train_token_s": 0,'
        ' "prefill_token_s": 0, "train_step_s": 3}'
    )
    options = ["--costs", str(tmp_path / "costs.json"), "--lengths", "fixed:5", "--json"]
    code, output = run("simulate", "recipes/hybrid.toml", *SMALL, *options)
    assert code == 0, output
    assert json.loads(output)["modes"][0]["outcome"]["step_s"] == pytest.approx(5 + 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--costs", "none.json"], "cannot be read"),
        (["--lengths", "lognormal:5"], "expected fixed:LENGTH"),
        (["rollout.slot=5"], "rollout.slots"),
    ],
)
def test_simulate_explains_wrong_options(options: list[str], words: str) -> None:
    code, output = run("simulate", "recipes/hybrid.toml", *options)
    assert code == 2 and words in " ".join(output.split())


def test_simulate_accepts_training_without_cost_beside_slow_generation(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(
        '{"train_step_s": 0, "train_token_s": 0, "pool_decode": 1.5}'
    )
    options = ["--devices", "2", "--costs", str(tmp_path / "costs.json")]
    code, output = run("simulate", "recipes/hybrid.toml", *SMALL, *options)
    assert code == 0 and "fastest" in output


def test_simulate_rejects_costs_of_zero(tmp_path: Path) -> None:
    names = ("decode_step", "decode_sequence", "decode_context", "prefill_token")
    costs = {f"{name}_s": 0 for name in (*names, "train_step", "train_token", "load")}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    options = ["--costs", str(tmp_path / "costs.json")]
    code, output = run("simulate", "recipes/hybrid.toml", *SMALL, *options)
    assert code == 2 and "take no time" in " ".join(output.split())


def test_simulate_rejects_costs_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_bytes(b"\xeb")
    code, output = run("simulate", "recipes/hybrid.toml", "--costs", str(tmp_path / "costs.json"))
    assert code == 2 and "Invalid JSON" in output


@pytest.mark.slow
def test_plan_probe_proposes_run_that_compares_itself(tmp_path: Path) -> None:
    """Real engine and trainer of the tiny model, on a thread."""
    path = tmp_path / "costs.json"
    settings = [*SMALL, f"run_dir={tmp_path / 'run'}", "steps=8"]
    code, output = run("plan", "recipes/hybrid.toml", *settings, "--probe", "--costs", str(path))
    assert code == 0, output
    assert "decode step by sequences: " in output and "proposal: " in output
    command = shlex.split(output.splitlines()[-1])
    assert command[:2] == ["paceline", "train"]
    code, output = run(*command[1:])
    assert code == 0, output
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["prediction"]
    assert found["text"].split(":")[0] in " ".join(output.replace("│", "").split())
    assert found["measured_steps_per_s"] > 0 and isinstance(found["off"], bool)
    costs = read_costs(path)
    assert costs.train_step_s + costs.train_token_s > 0
    assert costs.decode_step_s + costs.decode_sequence_s + costs.decode_context_s > 0
    assert costs.fit_error is not None


def test_plan_rejects_lengths_without_probe() -> None:
    code, output = run("plan", "recipes/hybrid.toml", "--lengths", "fixed:5")
    assert code == 2 and "--lengths fixed:5 needs --probe" in " ".join(output.split())


def test_plan_probe_rejects_another_shape() -> None:
    code, output = run("plan", "recipes/hybrid.toml", "--probe", "--shape", "7b")
    assert code == 2 and "--probe contradicts --shape 7b" in " ".join(output.split())
