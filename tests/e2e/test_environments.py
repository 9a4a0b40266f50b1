"""Runs in which an environment replies to the model."""

import asyncio
import json
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.run import train
from tests.audits import assert_consistent
from tests.small_runs import SEPARATE, SMALL

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_environment.py"


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


def test_environment_by_name_needs_neither_data_nor_reward(model: str, tmp_path: Path) -> None:
    chosen = [f"model={model}", f"run_dir={tmp_path}", "steps=2", "groups_per_step=4"]
    chosen += ["group_size=4", "rollout.environment=guess", "rollout.max_turns=3"]
    chosen += ["rollout.max_response_length=4", "data.max_prompt_length=64", "evaluation.limit=4"]
    asyncio.run(train(load_config(None, [*chosen, "placement.threads=1"])))
    assert_consistent(tmp_path)
    assert len((tmp_path / "evaluations.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_model_learns_game_of_several_turns(tmp_path: Path) -> None:
    asyncio.run(train(load_config("guess", [f"run_dir={tmp_path}"])))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[:5]) / 5 < 0.3 and sum(rewards[-10:]) / 10 > 0.45


@pytest.mark.slow
def test_model_learns_to_call_tool_that_it_needs(tmp_path: Path) -> None:
    chosen = [f"run_dir={tmp_path}", f"rollout.environment={EXAMPLE}:Lookup", "steps=110"]
    asyncio.run(train(load_config("hybrid", chosen)))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[:5]) / 5 < 0.05 and sum(rewards[-10:]) / 10 > 0.4
    assert rows[-1]["episode/turns_mean"] > 1.9
