"""Complete runs with Megatron ranks: fully async, hybrid, with all roles, resumed elsewhere."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import load_config
from paceline.errors import PacelineError
from paceline.run import train
from tests.megatron.cpu_workers import cpu_workers
from tests.processes import children
from tests.small_runs import steps_of

ROOT = Path(__file__).parents[2]
SMALL = [
    "groups_per_step=4",
    "group_size=4",
    "data.task=copy:3",
    "data.limit=256",
    "placement.threads=1",
    "data.max_prompt_length=32",
]


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with cpu_workers():
        yield


def run(model: str, folder: Path, *settings: str, recipe: str = "megatron_async") -> dict[str, Any]:
    reward = f"reward.function={ROOT}/tests/rewards.py:letters"
    chosen = load_config(
        ROOT / "recipes" / f"{recipe}.toml",
        [f"model={model}", f"run_dir={folder}", reward, *SMALL, *settings],
    )
    summary = asyncio.run(train(chosen))
    assert not children()
    return summary


def test_async_recipe_on_two_ranks_resumes_on_single_device(
    on_cpu: None, model: str, tmp_path: Path
) -> None:
    summary = run(model, tmp_path, "steps=3")
    assert summary["steps"] == 3 and summary["ledger"]["trained"] == 12
    assert summary["staleness_max"] <= 2
    one = ["train.backend=single", "train.tensor_parallel=1", "placement.train_ranks=1"]
    assert run(model, tmp_path, "steps=4", *one)["steps"] == 4


def test_hybrid_recipe_generates_with_current_weights(
    on_cpu: None, model: str, tmp_path: Path
) -> None:
    summary = run(model, tmp_path, "steps=3", recipe="megatron_hybrid")
    assert summary["ledger"]["trained"] == 12 and summary["staleness_max"] == 0
    assert all(row["train/logprob_diff_max"] < 1e-4 for row in steps_of(tmp_path))


def test_actor_critic_and_reference_share_pipeline(
    on_cpu: None, model: str, tmp_path: Path
) -> None:
    roles = [
        "algorithm.name=ppo",
        "algorithm.kl_coef=0.1",
        "train.tensor_parallel=1",
        "train.pipeline_parallel=2",
    ]
    assert run(model, tmp_path, "steps=2", *roles)["steps"] == 2
    assert all(row["critic/loss"] > 0 and "train/kl_reference" in row for row in steps_of(tmp_path))


def test_run_fails_with_reason_when_gpu_is_missing(model: str, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"train.backend = 'megatron' needs a CUDA device"):
        run(model, tmp_path, "steps=1")
