"""Settings of runs that take a second, an observer, and what tests compare of them."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.config import RunConfig, load_config
from paceline.run import train

SEPARATE = ["placement.actor=train", "placement.rollout=rollout"]

SMALL = [
    "steps=4",
    "groups_per_step=4",
    "group_size=4",
    "data.task=copy:3",
    "data.limit=256",
    "rollout.max_response_length=8",
    "placement.threads=1",
    "train.learning_rate=1e-3",
    "data.max_prompt_length=32",
    f"reward.function={Path(__file__).parent}/rewards.py:letters",
]


def config(model: str, folder: Path, *settings: str) -> RunConfig:
    return load_config(None, [f"model={model}", f"run_dir={folder}", *SMALL, *settings])


def run(model: str, folder: Path, *settings: str) -> dict[str, Any]:
    return asyncio.run(train(config(model, folder, *settings)))


class OnStep:
    """Observer that calls a function with the number of each step that is done."""

    def __init__(self, act: Callable[[int], object]) -> None:
        self._act = act

    def step_done(self, step: int, *_: object) -> None:
        self._act(step)

    def engines_polled(self, *_: object) -> None:
        return


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path, step: int, role: str = "actor") -> str:
    """Return a digest of all files the role saved: weights and optimizer state."""
    checkpoint = folder / "checkpoints" / f"step_{step:08d}"
    folders = (checkpoint / role, checkpoint / "training" / role)
    files = [file for where in folders for file in sorted(where.rglob("*.safetensors"))]
    assert len(files) >= 2
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
