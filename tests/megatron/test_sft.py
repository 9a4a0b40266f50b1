"""Supervised fine-tuning with Megatron, compared with one device."""

from pathlib import Path

import pytest

from tests.e2e.test_sft import losses, run
from tests.megatron.cpu_workers import cpu_workers
from tests.models import random_model

SPLITS = {
    "tensor parallel": ["train.tensor_parallel=2"],
    "pipeline parallel": ["train.pipeline_parallel=2"],
}


@pytest.mark.parametrize("name", SPLITS)
def test_two_megatron_ranks_train_like_one_device(name: str, tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    one = run(model, tmp_path / "one")
    with cpu_workers():
        two = run(model, tmp_path / "two", "train.backend=megatron", *SPLITS[name])
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert two["validation_loss"] == pytest.approx(one["validation_loss"], abs=1e-5)
