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

TO_COMPARE = ["train.learning_rate=1e-4", "save_samples=100", "save_every=1", "keep_checkpoints=9"]
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


def texts(folder: Path) -> list[str]:
    """Return all completions that the run saved."""
    rows = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    return [completion["text"] for row in rows for completion in row["completions"]]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def single(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train four steps on one device."""
    folder = tmp_path_factory.mktemp("single")
    run(model, folder, "steps=4", *TO_COMPARE)
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["train.offload=true"],
        pytest.param(["train.tensor_parallel=2"], marks=pytest.mark.slow),
    ],
    ids=["data parallel", "offload", "tensor parallel"],
)
def test_two_ranks_generate_and_train_like_one_device(
    model: str, single: Path, tmp_path: Path, settings: list[str]
) -> None:
    run(model, tmp_path, "steps=3", *TO_COMPARE, *FSDP, *settings)
    one, two = steps_of(single), steps_of(tmp_path)
    for row in two:
        assert row["fleet/engines"] == 2 and row["fleet/completions_min"] > 0
        assert row["train/logprob_diff_max"] < 1e-4, "engine and trainer have different weights"
    for name in ("reward/mean", "train/loss", "train/grad_norm"):
        assert [row[name] for row in two] == pytest.approx([row[name] for row in one[:3]], abs=1e-5)
    assert max_diff(actor_weights(single, 3), actor_weights(tmp_path, 3)) < 1e-5
    assert texts(tmp_path) == texts(single)[: len(texts(tmp_path))]
    # resume the checkpoint of two ranks on one device
    run(model, tmp_path, "steps=4", *TO_COMPARE)
    assert steps_of(tmp_path)[3]["train/loss"] == pytest.approx(one[3]["train/loss"], abs=1e-5)


@pytest.mark.parametrize("offload", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_unfinished_completions_survive_train_steps_in_shared_pool(
    model: str, tmp_path: Path, offload: str
) -> None:
    freedom = ["schedule.max_staleness=2", "schedule.on_sync=swap", f"train.offload={offload}"]
    summary = run(model, tmp_path, "steps=4", *freedom, *FSDP)
    assert summary["steps"] == 4 and summary["staleness_max"] > 0
    assert all(row.get("train/logprob_diff_max", 0.0) < 1e-4 for row in steps_of(tmp_path))


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


@pytest.mark.parametrize(
    ("placement", "pool", "rank"),
    [
        (SEPARATE, "train", 1),
        pytest.param([], "main", 0, marks=pytest.mark.slow),
        ([], "main", 1),
    ],
)
def test_run_fails_and_names_rank_when_rank_is_killed(
    model: str, tmp_path: Path, placement: list[str], pool: str, rank: int
) -> None:
    killed_s: list[float] = []

    class Killer:
        def step_done(self, step: int, *_: object) -> None:
            if step == 1:
                log = str((tmp_path / "logs" / f"{pool}.{rank}.log").resolve())
                process = next(
                    p
                    for p in psutil.Process().children()
                    if os.path.realpath(f"/proc/{p.pid}/fd/1") == log
                )
                os.kill(process.pid, signal.SIGKILL)
                killed_s.append(time.monotonic())

        def engines_polled(self, *_: object) -> None:
            return

    chosen = config(
        model,
        tmp_path,
        "steps=1000",
        *placement,
        *FSDP,
        "schedule.max_staleness=2",
        "schedule.on_sync=swap",
    )
    with pytest.raises(WorkerDied, match=rf"worker '{pool} rank {rank}' died .killed by signal 9"):
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
