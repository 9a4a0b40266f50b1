"""Runs in which an environment replies to the model."""

import asyncio
import json
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.run import train
from tests.audits import assert_consistent
from tests.processes import children
from tests.small_runs import SEPARATE, SMALL, weights

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_environment.py"
HOSTED = Path(__file__).parents[1] / "unit" / "hosted_environments.py"


@pytest.mark.parametrize("place", [[], [*SEPARATE, "schedule.max_staleness=1"]])
def test_run_trains_on_all_turns_of_conversations(
    place: list[str], model: str, tmp_path: Path
) -> None:
    chosen = [f"model={model}", f"run_dir={tmp_path}", *SMALL, *place]
    chosen += [f"rollout.environment={EXAMPLE}:Lookup", "save_samples=4"]
    asyncio.run(train(load_config(None, [*chosen, "steps=2"])))
    assert_consistent(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    ends = ("done", "turns", "length", "context")
    for row in rows:
        assert sum(row[f"episode/end_{end}"] for end in ends) == pytest.approx(1.0, abs=1e-3)
    assert max(row["episode/turns_mean"] for row in rows) > 1, "no episode had a second turn"
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    completions = [completion for sample in samples for completion in sample["completions"]]
    assert {completion["end"] for completion in completions} <= set(ends)
    assert any(len(completion.get("turns", ())) == 2 for completion in completions)


def test_run_in_environment_workers_equals_run_in_controller(model: str, tmp_path: Path) -> None:
    rows = []
    for workers in (0, 2):
        folder = tmp_path / str(workers)
        chosen = [f"model={model}", f"run_dir={folder}", *SMALL, "steps=2"]
        chosen += [f"rollout.environment={EXAMPLE}:Lookup"]
        chosen += [f"rollout.environment_workers={workers}"]
        asyncio.run(train(load_config(None, chosen)))
        rows.append(weights(folder, 2))
    assert rows[0] == rows[1]
    assert not children()


def test_run_continues_when_environment_worker_dies(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRASHED", str(tmp_path / "crashed"))
    folder = tmp_path / "run"
    chosen = [f"model={model}", f"run_dir={folder}", *SMALL, "steps=2"]
    chosen += [f"rollout.environment={HOSTED}:SometimesCrashes"]
    # Its process has one of the two groups that were admitted first, or both.
    chosen += ["rollout.environment_workers=2", "rollout.max_failed_groups=4"]
    summary = asyncio.run(train(load_config(None, chosen)))
    assert summary["steps"] == 2 and summary["ledger"]["dropped"]["rollout_failed"] > 0
    assert_consistent(folder)
    assert (
        "died during step(): its process ended with exit code 5"
        in (folder / "logs" / "main.log").read_text()
    )
    assert not children()


@pytest.mark.slow
def test_model_learns_to_call_tool_that_it_needs(tmp_path: Path) -> None:
    chosen = [f"run_dir={tmp_path}", f"rollout.environment={EXAMPLE}:Lookup", "steps=110"]
    asyncio.run(train(load_config("hybrid", chosen)))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[:5]) / 5 < 0.05 and sum(rewards[-10:]) / 10 > 0.4
    assert rows[-1]["episode/turns_mean"] > 1.9
