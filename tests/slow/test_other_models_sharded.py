"""FSDP training of architectures that Paceline runs through their Hugging Face module."""

from pathlib import Path

import pytest

from tests.e2e.test_other_models import agree_and_learn
from tests.models import random_other_model
from tests.small_runs import SEPARATE


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "gemma2", "opt"])
def test_two_fsdp_ranks_learn_from_engine_samples(name: str, tmp_path: Path) -> None:
    model = random_other_model(tmp_path / "model", name)
    sharded = ["train.backend=fsdp", "placement.train_ranks=2", "train.gradient_checkpointing=true"]
    agree_and_learn(model, tmp_path / "run", [*SEPARATE, *sharded])
