"""Ranks that alternate hold in each phase what `paceline plan` predicts."""

import asyncio
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.run import train
from tests.models import random_model

FSDP = ["train.backend=fsdp", "placement.train_ranks=2"]
# Few tokens: activations are a bound, so they must not count.
SHORT = ["groups_per_step=1", "group_size=4", "rollout.max_response_length=4"]


@pytest.mark.parametrize(
    "settings",
    [
        ["train.offload=true"],
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["train.tensor_parallel=2"], marks=pytest.mark.slow),
    ],
    ids=["offload", "no offload", "tensor parallel"],
)
def test_ranks_hold_planned_memory_in_each_phase(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the C library keeps freed memory to use it again, and measures are too high.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(64 << 10))
    model = random_model(tmp_path / "model", hidden=640, layers=8)  # 110 MB in float32
    reward = f"reward.function={Path(__file__).parents[1]}/rewards.py:letters"
    options = [f"model={model}", f"run_dir={tmp_path}/run", "steps=2", "data.task=copy:3", reward]
    config = load_config(None, [*options, *FSDP, *SHORT, *settings])
    summary = asyncio.run(train(config))
    measured, planned = summary["memory_phases"], summary["memory_planned"]
    assert set(planned) == {"generate", "train", "sync"}
    for phase, (least, most) in planned.items():
        expected = least if phase == "train" else most  # without activations, with the KV cache
        for rank in (0, 1):
            assert measured[f"rank_{rank}_{phase}"] == pytest.approx(expected, rel=0.1), phase
