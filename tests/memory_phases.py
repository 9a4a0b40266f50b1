"""Memory that ranks hold in each phase of a run, compared with the plan."""

import asyncio
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.run import train
from tests.models import random_model

MODEL = 110 << 20  # in float32
# Few tokens: activations are a bound, so they must not count.
# Both ranks generate, because each gets a group.
SHORT = ["groups_per_step=2", "group_size=4", "rollout.slots=4", "rollout.max_response_length=4"]


def check_memory_of_two_ranks(
    settings: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    always: int = 0,
    while_training: int = 0,
) -> None:
    """Run two ranks and compare their peaks with the plan.

    always, while_training: bytes that ranks on CPUs need in addition.
    """
    # Otherwise the C library keeps freed memory to use it again, and measures are too high.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(64 << 10))
    model = random_model(folder / "model", hidden=640, layers=8)  # MODEL bytes
    reward = f"reward.function={Path(__file__).parent}/rewards.py:letters"
    options = [f"model={model}", f"run_dir={folder}/run", "steps=2", reward]
    options += ["data.task=copy:3", "data.limit=256"]
    config = load_config(None, [*options, "placement.train_ranks=2", *SHORT, *settings])
    summary = asyncio.run(train(config))
    measured, planned = summary["memory_phases"], summary["memory_planned"]
    assert set(planned) == {"generate", "train", "sync"}
    for phase, (least, most) in planned.items():
        # without activations, with the KV cache
        expected = always + (least + while_training if phase == "train" else most)
        for rank in (0, 1):
            assert measured[f"rank_{rank}_{phase}"] == pytest.approx(expected, rel=0.1), phase
