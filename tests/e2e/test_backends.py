"""Complete runs whose trainer is a group of FSDP ranks: hybrid and fully async, with all roles."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.config import load_config
from paceline.errors import ConfigError, WorkerDied
from paceline.run import train
from tests.e2e.test_runs import SEPARATE, config, run
from tests.models import random_model
from tests.processes import children

FSDP = ["train.backend=fsdp", "placement.train_ranks=2"]
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_model(tmp_path_factory.mktemp("model"))


def actor_weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(
        folder / "checkpoints" / f"step_{step:08d}" / "actor"
    ).state_dict()


def max_diff(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_ranks_train_like_one_device_and_resume_there(model: str, tmp_path: Path) -> None:
    run(model, tmp_path / "single", "steps=2", "train.learning_rate=1e-4")
    run(model, tmp_path / "ranks", "steps=2", "train.learning_rate=1e-4", *FSDP)
    one, two = steps_of(tmp_path / "single"), steps_of(tmp_path / "ranks")
    for name in ("reward/mean", "train/loss", "train/grad_norm"):
        assert [row[name] for row in two] == pytest.approx([row[name] for row in one], abs=1e-5)
    assert (
        max_diff(actor_weights(tmp_path / "single", 2), actor_weights(tmp_path / "ranks", 2)) < 1e-5
    )
    diffs = [row["train/logprob_diff_max"] for row in two]
    assert max(diffs) < 1e-4, "engine and trainer have different weights"
    run(model, tmp_path / "single", "steps=3", "train.learning_rate=1e-4")
    # resume the checkpoint of two ranks on one device
    run(model, tmp_path / "ranks", "steps=3", "train.learning_rate=1e-4")
    one, two = steps_of(tmp_path / "single"), steps_of(tmp_path / "ranks")
    assert two[2]["train/loss"] == pytest.approx(one[2]["train/loss"], abs=1e-5)


def test_async_recipe_trains_on_two_ranks_within_staleness_bound(
    model: str, tmp_path: Path
) -> None:
    small = [
        "steps=3",
        "groups_per_step=4",
        "group_size=4",
        "data.task=copy:3",
        "placement.threads=1",
        "data.max_prompt_length=32",
    ]
    reward = f"reward.function={Path(__file__).parents[1]}/rewards.py:letters"
    chosen = load_config(
        RECIPES / "fsdp_async.toml", [f"model={model}", f"run_dir={tmp_path}", reward, *small]
    )
    summary = asyncio.run(train(chosen))
    assert summary["steps"] == 3 and summary["ledger"]["trained"] == 12
    assert 0 <= summary["staleness_max"] <= chosen.schedule.max_staleness
    assert not children()


def test_actor_critic_and_reference_train_in_separate_pools(model: str, tmp_path: Path) -> None:
    roles = [
        "algorithm.name=ppo",
        "algorithm.kl_coef=0.1",
        "placement.critic=critics",
        "placement.rollout=rollout",
        "train.offload=true",
    ]
    summary = run(model, tmp_path, "steps=2", *roles, *FSDP)
    assert summary["steps"] == 2
    assert all(
        row["critic/loss"] > 0 and "train/kl_reference" in row and row["train/offload_bytes"] == 0
        for row in steps_of(tmp_path)
    )


def test_run_fails_and_names_rank_when_rank_is_killed(model: str, tmp_path: Path) -> None:
    killed_s: list[float] = []

    class Killer:
        def step_done(self, step: int, *_: object) -> None:
            if step == 1:
                log = str((tmp_path / "logs" / "train.1.log").resolve())
                rank = next(
                    p
                    for p in psutil.Process().children()
                    if os.path.realpath(f"/proc/{p.pid}/fd/1") == log
                )
                os.kill(rank.pid, signal.SIGKILL)
                killed_s.append(time.monotonic())

        def engines_polled(self, *_: object) -> None:
            return

    chosen = config(
        model,
        tmp_path,
        "steps=1000",
        *SEPARATE,
        *FSDP,
        "schedule.max_staleness=2",
        "schedule.on_sync=swap",
    )
    with pytest.raises(WorkerDied, match=r"worker 'train rank 1' died .killed by signal 9"):
        asyncio.run(asyncio.wait_for(train(chosen, lambda _: Killer()), 60))
    assert time.monotonic() - killed_s[0] < 30
    assert not children()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["placement.train_ranks=2"], "train_ranks = 2 contradicts train.backend = 'single'"),
        (
            ["train.tensor_parallel=2"],
            "train.tensor_parallel = 2 contradicts train.backend = 'single'",
        ),
        (
            ["train.backend=fsdp", "train.pipeline_parallel=2"],
            "train.pipeline_parallel = 2 contradicts train.backend = 'fsdp'",
        ),
        (
            ["train.backend=fsdp", "train.tensor_parallel=2", "placement.train_ranks=3"],
            "set train_ranks to a multiple of 2",
        ),
        (
            ["train.backend=fsdp", "train.lora.rank=4"],
            "train.lora contradicts train.backend = 'fsdp'",
        ),
    ],
)
def test_settings_are_rejected_when_they_contradict_backend(
    settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, settings)
