"""Whole runs of models that our own forward pass does not know: everything else about them is as with any other."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.test_runs import SEPARATE, run, weights
from tests.models import random_other_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_other_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "settings",
    {
        "hybrid": ["train.gradient_checkpointing=true", "algorithm.kl_coef=0.1"],
        "fully async, with a critic": [
            *SEPARATE,
            "schedule.max_staleness=2",
            "schedule.on_sync=swap",
            "algorithm.name=ppo",
        ],
        "one device, at the same time": [
            "placement.overlap=true",
            "schedule.max_staleness=2",
            "schedule.on_sync=swap",
        ],
        "adapters": ["train.lora.rank=4", "algorithm.kl_coef=0.1"],
    }.values(),
    ids=lambda settings: " ".join(settings),
)
def test_engine_and_trainer_agree_in_every_mode_and_the_model_learns(
    model: str, tmp_path: Path, settings: list[str]
) -> None:
    agree_and_learn(model, tmp_path, settings)


def agree_and_learn(model: str, folder: Path, settings: list[str]) -> None:
    summary = run(model, folder, *settings, "save_every=4")
    assert summary["steps"] == 4
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    gaps = [step["train/logprob_diff_max"] for step in steps if "train/logprob_diff_max" in step]
    assert gaps and max(gaps) < 1e-4
    trained = AutoModelForCausalLM.from_pretrained(
        folder / "checkpoints" / "step_00000004" / "actor"
    )
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert any((tensor != before[name]).any() for name, tensor in trained.state_dict().items())


def test_a_stopped_and_continued_run_is_bit_for_bit_one_that_never_stopped(
    model: str, tmp_path: Path
) -> None:
    run(model, tmp_path / "whole")
    run(model, tmp_path / "parts", "steps=2")
    run(model, tmp_path / "parts")
    assert weights(tmp_path / "whole", 4) == weights(tmp_path / "parts", 4)
