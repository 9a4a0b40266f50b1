"""Distillation in complete runs: in every mode, with and without a reward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

import paceline
from paceline.config import load_config
from paceline.data.tiny import make_tokenizer
from paceline.errors import CheckpointError
from paceline.types import Role
from paceline.workers.build import build_parts
from tests.models import random_model
from tests.small_runs import SEPARATE, config, run, steps_of, weights

ROWS = [{"prompt": f"copy {letter}="} for letter in "abcdefgh"]
# On threads; the slow tests have the teacher and the engine in other processes.
FULLY_ASYNC = ["placement.overlap=true", "schedule.max_staleness=2", "schedule.on_sync=swap"]
LEARNS: dict[str, Any] = {
    "steps": 15,
    "groups_per_step": 16,
    "group_size": 4,
    "rollout.max_response_length": 6,
    "data.max_prompt_length": 32,
    "train.learning_rate": 3e-3,
    "train.staleness_kl_target": 0,
    "placement.threads": 1,
    "display": False,
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model of another size."""
    return random_model(tmp_path_factory.mktemp("teacher"), hidden=64, layers=3, seed=1)


def sharpened(model: str, folder: Path) -> str:
    """Save the model with larger logits, so that it prefers a few tokens in each context."""
    sharp = Qwen2ForCausalLM.from_pretrained(model)
    with torch.no_grad():
        sharp.model.norm.weight.mul_(20)
    sharp.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def kl(folder: Path) -> list[float]:
    return [step["distill/kl"] for step in steps_of(folder)]


def test_kl_falls_without_reward(model: str, teacher: str, tmp_path: Path) -> None:
    run = paceline.train(
        model=sharpened(model, tmp_path / "student"),
        data=ROWS,
        algorithm={"name": "distill", "teacher": teacher},
        run_dir=str(tmp_path / "run"),
        **LEARNS,
    )
    values = kl(tmp_path / "run")
    assert sum(values[-5:]) / 5 < 0.4 * values[0], values
    assert run.summary["distill_kl_first"] == pytest.approx(values[0], rel=1e-4)
    assert run.summary["distill_kl_last"] < 0.4 * values[0] and run.summary["reward_last"] == 0


DISTILL = ["algorithm.name=distill", "group_size=1", "groups_per_step=8"]


@pytest.mark.parametrize(
    "settings",
    [
        FULLY_ASYNC,
        pytest.param(
            [*SEPARATE, "placement.ref=teacher", "schedule.max_staleness=1"],
            marks=pytest.mark.slow,
        ),
        ["algorithm.correction=truncate", "algorithm.mini_batches=2", "schedule.max_staleness=2"],
        ["train.backend=fsdp"],
    ],
    ids=["fully async", "one step off, teacher in a separate pool", "corrected", "FSDP"],
)
def test_distillation_runs_in_every_mode(
    settings: list[str], model: str, teacher: str, tmp_path: Path
) -> None:
    summary = run(model, tmp_path, *DISTILL, f"algorithm.teacher={teacher}", *settings)
    assert summary["steps"] == 4 and not summary["ledger"]["dropped"]
    assert summary["staleness_max"] <= 2 and len(kl(tmp_path)) == 4


@pytest.mark.slow
def test_placement_does_not_change_distilled_weights(
    model: str, teacher: str, tmp_path: Path
) -> None:
    chosen = [*DISTILL, f"algorithm.teacher={teacher}"]
    run(model, tmp_path / "hybrid", *chosen)
    run(model, tmp_path / "separate", *chosen, *SEPARATE, "placement.ref=teacher")
    assert weights(tmp_path / "hybrid", 4) == weights(tmp_path / "separate", 4)


def test_teacher_combines_with_reward(model: str, teacher: str, tmp_path: Path) -> None:
    both = ["algorithm.name=distill", "algorithm.advantage=group", f"algorithm.teacher={teacher}"]
    run(model, tmp_path / "both", *both)
    run(model, tmp_path / "less", *both, "algorithm.kl_coef=0.1")
    run(model, tmp_path / "alone", *both, "algorithm.advantage=none")
    names = ("both", "less", "alone")
    assert len({weights(tmp_path / name, 4) for name in names}) == 3


def test_penalty_of_other_algorithm_uses_teacher(model: str, teacher: str, tmp_path: Path) -> None:
    run(model, tmp_path / "policy", "algorithm.kl_coef=0.1")
    run(model, tmp_path / "teacher", "algorithm.kl_coef=0.1", f"algorithm.teacher={teacher}")
    assert weights(tmp_path / "policy", 4) != weights(tmp_path / "teacher", 4)
    assert len(kl(tmp_path / "teacher")) == 4


def test_resume_fails_when_teacher_changes(model: str, tmp_path: Path) -> None:
    chosen = [*DISTILL, f"algorithm.teacher={random_model(tmp_path / 'teacher', seed=1)}"]
    run(model, tmp_path / "run", *chosen, "steps=1")
    random_model(tmp_path / "teacher", seed=2)
    with pytest.raises(CheckpointError, match="teacher: its content changed"):
        run(model, tmp_path / "run", *chosen, "steps=2")


def test_lora_keeps_teacher_as_separate_model(model: str, teacher: str, tmp_path: Path) -> None:
    chosen = config(model, tmp_path, *DISTILL, f"algorithm.teacher={teacher}", "train.lora.rank=4")
    parts: Any = build_parts((Role.ACTOR, Role.REF), chosen, model, 1)
    reference, actor = parts[Role.REF]._engine, parts[Role.ACTOR]._actor.engine
    assert reference is not actor
    sizes = [sum(weight.numel() for _, weight in e.export_weights()) for e in (reference, actor)]
    assert sizes[0] > 2 * sizes[1]


@pytest.mark.slow
def test_recipe_raises_reward_to_that_of_teacher(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "distill.toml"
    summary = paceline.train(recipe, run_dir=str(tmp_path), display=False).summary
    assert summary["reward_first"] < 0.5 and summary["reward_last"] > 0.8
    assert summary["distill_kl_last"] < 0.2 * summary["distill_kl_first"]
    assert load_config(recipe).group_size == 1
