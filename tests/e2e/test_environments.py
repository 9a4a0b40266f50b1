"""Runs in which an environment replies to the model."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from paceline.config import load_config
from paceline.model.loading import load_tokenizer
from paceline.rollout.in_flight_files import read_in_flight
from paceline.run import train
from tests.audits import assert_consistent
from tests.e2e.test_resume import Recording
from tests.processes import children
from tests.small_runs import SEPARATE, SMALL, config, steps_of

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "tool_environment.py"
HOSTED = Path(__file__).parents[1] / "unit" / "hosted_environments.py"


@pytest.mark.parametrize(
    "place",
    [[], pytest.param([*SEPARATE, "schedule.max_staleness=1"], marks=pytest.mark.slow)],
)
def test_run_trains_on_all_turns_of_conversations(
    place: list[str], model: str, tmp_path: Path
) -> None:
    chosen = [f"model={model}", f"run_dir={tmp_path}", *SMALL, *place]
    chosen += [f"rollout.environment={EXAMPLE}:Lookup", "save_samples=4"]
    asyncio.run(train(load_config(None, [*chosen, "steps=2"])))
    assert_consistent(tmp_path)
    rows = steps_of(tmp_path)
    ends = ("done", "turns", "length", "context")
    for row in rows:
        assert sum(row[f"episode/end_{end}"] for end in ends) == pytest.approx(1.0, abs=1e-3)
    assert max(row["episode/turns_mean"] for row in rows) > 1, "no episode had a second turn"
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    completions = [completion for sample in samples for completion in sample["completions"]]
    assert {completion["end"] for completion in completions} <= set(ends)
    assert any(len(completion.get("turns", ())) == 2 for completion in completions)


GUESSING = """
from paceline import Reply

class Guessing:
    async def reset(self, row):
        self.left = 2
        return [{"role": "user", "content": row["prompt"]}]

    async def step(self, message):
        self.left -= 1
        return Reply("no", 0.1 * len(message["content"]), done=self.left < 0)
"""
# Keeps only the last character of earlier completions.
FORGETTING = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'][-1:] }}{% else %}{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_run_trains_on_conversations_whose_template_forgets(
    algorithm: str, model: str, tmp_path: Path
) -> None:
    forgetful, run_dir = tmp_path / "model", tmp_path / "run"
    shutil.copytree(model, forgetful)
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = FORGETTING
    tokenizer.save_pretrained(forgetful)
    (tmp_path / "guessing.py").write_text(GUESSING)
    chosen = [f"model={forgetful}", f"run_dir={run_dir}", *SMALL, "save_samples=4", "steps=2"]
    chosen += [f"rollout.environment={tmp_path}/guessing.py:Guessing", "data.max_prompt_length=64"]
    chosen += [f"algorithm.name={algorithm}", "algorithm.mini_batches=2"]
    chosen += [f"rollout.stop={list('acegikmoqsuwy13579')}", "rollout.max_response_length=16"]
    asyncio.run(train(load_config(None, chosen)))
    assert_consistent(run_dir)
    rows = steps_of(run_dir)
    for row in rows:
        assert row["episode/splits_mean"] > 0
        assert row["rollout/samples"] == pytest.approx(16 * (1 + row["episode/splits_mean"]))
        assert row["rollout/length_mean"] == pytest.approx(row["rollout/tokens"] / 16)
    assert rows[0]["train/logprob_diff_max"] < 1e-3, "the trainer saw another context"
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    turns = [t for row in samples for c in row["completions"] for t in c.get("turns", ())]
    assert any(turn.get("restarts") for turn in turns)


@pytest.mark.parametrize("on_sync", ["swap", "interrupt"])
def test_resumed_run_continues_conversations_of_killed_one(
    on_sync: str, model: str, tmp_path: Path
) -> None:
    # Many turns: at any time, some trajectory is in a later one.
    (tmp_path / "guessing.py").write_text(GUESSING.replace("self.left = 2", "self.left = 7"))
    chosen = ["schedule.max_staleness=2", f"schedule.on_sync={on_sync}"]
    chosen += [f"rollout.environment={tmp_path}/guessing.py:Guessing"]
    chosen += [f"rollout.stop={list('acegikmoqsuwy13579')}", "rollout.max_response_length=32"]
    chosen += ["data.max_prompt_length=320", "steps=6", "save_every=2", "rollout.slots=3"]
    with pytest.raises(Recording.Crash):
        asyncio.run(train(config(model, tmp_path / "run", *chosen), lambda _: Recording(5)))
    saved = read_in_flight(tmp_path / "run" / "checkpoints" / "step_00000004")
    observer = Recording(0)
    asyncio.run(train(config(model, tmp_path / "run", *chosen), lambda _: observer))
    assert_consistent(tmp_path / "run")
    later = 0
    for seq in saved.keys() & observer.groups.keys():
        for index, calls in saved[seq].calls.items():
            turns = observer.groups[seq].trajectories[index].turns
            for number, call in enumerate(calls):
                part, whole = call.completion, turns[number].completion
                assert part is not None
                for array in ("tokens", "logprobs", "versions"):
                    begun = getattr(whole, array)[: len(part)]
                    assert begun.tolist() == getattr(part, array).tolist()
                later += number > 0
    assert later, "no episode was killed in a later turn"
    trajectories = [t for group in observer.groups.values() for t in group.trajectories]
    spread = [np.concatenate([t.completion.versions for t in each.turns]) for each in trajectories]
    assert all((np.diff(versions) >= 0).all() for versions in spread)
    assert any(versions[0] < versions[-1] for versions in spread), "no sync happened in an episode"


def test_example_trains_proposer_and_solver(model: str, tmp_path: Path) -> None:
    chosen = [f"model={model}", f"run_dir={tmp_path}", *SMALL, "steps=2", "save_samples=4"]
    chosen += [f"rollout.environment={EXAMPLES}/two_agents.py:ProposeAndSolve"]
    chosen += ["data.max_prompt_length=64", "rollout.min_group_size=2"]
    asyncio.run(train(load_config(None, chosen)))
    assert_consistent(tmp_path)
    rows = steps_of(tmp_path)
    assert [row["rollout/samples"] for row in rows] == [32, 32], "four groups of four episodes"
    for row in rows:
        means = row["reward_agent/proposer"] + row["reward_agent/solver"]
        assert row["reward/mean"] == pytest.approx(means / 2, abs=1e-6)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        agents = [completion["agent"] for completion in sample["completions"]]
        assert agents == ["proposer", "solver"] * 4


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
    rows = steps_of(tmp_path)
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[:5]) / 5 < 0.3 and sum(rewards[-10:]) / 10 > 0.45


def test_run_in_environment_workers_equals_run_in_controller(model: str, tmp_path: Path) -> None:
    found = []
    for workers in (0, 2):
        folder = tmp_path / str(workers)
        chosen = [f"model={model}", f"run_dir={folder}", *SMALL, "steps=2", "save_samples=4"]
        chosen += [f"rollout.environment={EXAMPLE}:Lookup"]
        chosen += [f"rollout.environment_workers={workers}"]
        asyncio.run(train(load_config(None, chosen)))
        rows = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
        completions = [(row["uid"], each) for row in rows for each in row["completions"]]
        # Log-probs may differ in the last bit: timing decides which turns are computed together.
        found.append([(uid, each["text"], each["reward"]) for uid, each in completions])
    assert found[0] == found[1] and len(found[0]) == 32
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
    rows = steps_of(tmp_path)
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[:5]) / 5 < 0.05 and sum(rewards[-10:]) / 10 > 0.4
    assert rows[-1]["episode/turns_mean"] > 1.9
