"""Evaluation during training, in real runs."""

from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.config import load_config
from paceline.errors import ConfigError, RewardError
from paceline.held_out import HeldOut
from paceline.job import Job
from paceline.line_file import intact_rows
from tests.audits import assert_consistent

ROWS = [{"prompt": f"say {i}", "answer": str(i)} for i in range(40)]
SETTINGS: dict[str, Any] = {
    "groups_per_step": 2,
    "group_size": 2,
    "data.max_prompt_length": 32,
    "rollout.max_response_length": 6,
    "train.learning_rate": 1e-3,
    "placement.threads": 1,
    "evaluation.every": 2,
    "evaluation.solved_at": 0.1,
}
MODES = {
    "hybrid": {},
    # On threads, and evaluations run beside train steps, as with separate pools.
    "fully async": {
        "placement.overlap": True,
        "schedule.max_staleness": 2,
        "schedule.on_sync": "swap",
    },
}


def letters(completion: str, row: dict[str, Any]) -> float:
    return sum(c.isalpha() for c in completion) / 10


def train(model: str, run_dir: Path, **more: Any) -> paceline.Run:
    return paceline.train(
        model=model,
        data=ROWS[:32],
        evaluation_data=ROWS[32:],
        reward=letters,
        run_dir=str(run_dir),
        display=False,
        **SETTINGS | more,
    )


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return list(intact_rows(run_dir / "evaluations.jsonl"))


@pytest.mark.parametrize("mode", MODES)
def test_first_last_and_every_second_version_is_evaluated_and_the_best_is_kept(
    mode: str, model: str, tmp_path: Path
) -> None:
    run = train(model, tmp_path, steps=5, **MODES[mode])
    found = lines(tmp_path)
    steps = [line["step"] for line in found]
    assert steps[0] == 0 and steps[-1] == 5 and steps == sorted(set(steps))
    if mode == "hybrid":
        assert steps == [0, 2, 4, 5]
    assert all(line["prompts"] == line["samples"] == 8 for line in found)
    summary, best = run.summary["evaluation"], max(found, key=lambda line: line["reward"])
    assert (summary["first"], summary["last"], summary["best"]) == (found[0], found[-1], best)
    link = tmp_path / "checkpoints" / "best"
    if best["step"]:
        assert link.resolve().name == f"step_{best['step']:08d}"
    else:
        assert not link.is_symlink(), "the initial model has no checkpoint"
    reported = [m["evaluation/reward"] for m in run.metrics if "evaluation/reward" in m]
    assert reported[0] == pytest.approx(found[0]["reward"], abs=1e-5)
    assert_consistent(tmp_path)


def test_evaluation_during_training_equals_evaluation_of_the_checkpoint(
    model: str, tmp_path: Path
) -> None:
    run = train(model, tmp_path, steps=2)
    alone = paceline.evaluate(
        model=run.checkpoint,
        data=ROWS[32:],
        reward=letters,
        **{name: SETTINGS[name] for name in SETTINGS if not name.startswith("train.")}
        | {"evaluation.every": 1},
    )
    assert {name: lines(tmp_path)[-1][name] for name in alone} == alone


def test_resumed_run_evaluates_what_is_missing(model: str, tmp_path: Path) -> None:
    train(model, tmp_path, steps=2)
    with (tmp_path / "evaluations.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "rewa')  # a crash, or a full disk
    run = train(model, tmp_path, steps=4)
    assert [line["step"] for line in lines(tmp_path)] == [0, 2, 4]
    assert run.summary["evaluation"]["first"]["step"] == 0
    assert_consistent(tmp_path)


def test_evaluation_does_not_change_what_is_learned(model: str, tmp_path: Path) -> None:
    with_it = train(model, tmp_path / "with", steps=3, **{"evaluation.samples": 3})
    without = paceline.train(
        model=model,
        data=ROWS[:32],
        reward=letters,
        steps=3,
        run_dir=str(tmp_path / "without"),
        display=False,
        **{name: value for name, value in SETTINGS.items() if not name.startswith("evaluation.")},
    )
    assert (with_it.checkpoint / "model.safetensors").read_bytes() == (
        without.checkpoint / "model.safetensors"
    ).read_bytes()


def test_settings_without_prompts_are_rejected(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluation.every: there are no held-out prompts"):
        paceline.train(
            model=model, data=ROWS, reward=letters, run_dir=str(tmp_path), evaluation={"every": 5}
        )


@pytest.mark.slow
def test_evaluation_has_prompts_for_engine_of_every_rank(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    class Noted(HeldOut):
        def __init__(self, *args: Any, slots: int, **more: Any) -> None:
            found.append(slots)
            super().__init__(*args, slots=slots, **more)

    monkeypatch.setattr("paceline.run.HeldOut", Noted)
    ranks = {"train.backend": "fsdp", "placement.train_ranks": 2, "rollout.slots": 4}
    train(model, tmp_path, steps=1, **ranks)
    assert found == [2 * 4]


def failing(completion: str, row: dict[str, Any]) -> float:
    if row["answer"] == "35":
        raise ValueError("no service for this row")
    return letters(completion, row)


def test_held_out_prompt_that_fails_is_left_out_when_failures_are_allowed(
    model: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"reward": failing, "evaluation_data": ROWS[32:], "steps": 2}
    options |= {"model": model, "data": ROWS[:32], "display": False, **SETTINGS}
    with pytest.raises(RewardError, match="no service for this row") as failed:
        paceline.train(run_dir=str(tmp_path / "strict"), **options)
    assert "rollout.max_failed_groups = 0" in failed.value.__notes__[0]
    options["rollout.max_failed_groups"] = 2  # in the evaluations of versions 0 and 2
    run = paceline.train(run_dir=str(tmp_path / "run"), **options)
    assert [(row["prompts"], row["failed"]) for row in lines(tmp_path / "run")] == [(7, 1)] * 2
    assert run.metrics[0]["evaluation/failed"] == 1
    assert_consistent(tmp_path / "run")


def test_progress_of_evaluation_counts_prompts_that_failed(model: str) -> None:
    values = {"model": model, "rollout.max_failed_groups": 1, "data.max_prompt_length": 32}
    values |= {"rollout.max_response_length": 2, "placement.threads": 1}
    seen: list[tuple[int, int]] = []
    job = Job(load_config(values=values), ROWS[34:37], reward=failing)
    found = job.evaluate(progress=lambda *done: seen.append(done)).result()
    assert (found["failed"], seen) == (1, [(1, 3), (2, 3), (3, 3)])
