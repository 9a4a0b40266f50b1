"""Complete runs of a model without a fast path, which generates through its Hugging Face module."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.models import random_other_model
from tests.small_runs import run, steps_of, weights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_other_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "settings",
    {
        "hybrid": ["train.gradient_checkpointing=true", "algorithm.kl_coef=0.1"],
        # tests/slow/test_other_models_sharded.py: in processes
        "one device, overlapping, with a critic": [
            "placement.overlap=true",
            "schedule.max_staleness=2",
            "schedule.on_sync=swap",
            "algorithm.name=ppo",
        ],
        "adapters": ["train.lora.rank=4", "algorithm.kl_coef=0.1"],
    }.values(),
    ids=lambda settings: " ".join(settings),
)
def test_engine_and_trainer_agree_in_every_mode(
    model: str, tmp_path: Path, settings: list[str]
) -> None:
    agree_and_learn(model, tmp_path, settings)


def agree_and_learn(model: str, folder: Path, settings: list[str]) -> None:
    summary = run(model, folder, *settings, "save_every=4")
    assert summary["steps"] == 4
    steps = steps_of(folder)
    diffs = [step["train/logprob_diff_max"] for step in steps if "train/logprob_diff_max" in step]
    assert diffs and max(diffs) < 1e-4
    trained = AutoModelForCausalLM.from_pretrained(
        folder / "checkpoints" / "step_00000004" / "actor"
    )
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert any((tensor != before[name]).any() for name, tensor in trained.state_dict().items())


def test_resumed_run_equals_uninterrupted_run_bit_for_bit(model: str, tmp_path: Path) -> None:
    run(model, tmp_path / "whole")
    run(model, tmp_path / "parts", "steps=2")
    run(model, tmp_path / "parts")
    assert weights(tmp_path / "whole", 4) == weights(tmp_path / "parts", 4)
