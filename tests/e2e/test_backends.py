"""Complete runs whose trainer is a group of FSDP ranks: hybrid and fully async, with all roles."""

import asyncio
import json
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.config import load_config
from paceline.errors import ConfigError, WorkerDied
from paceline.run import train
from tests.fault_report import Fault
from tests.hybrid import IN_FLIGHT, Run, largest_difference
from tests.processes import children
from tests.small_runs import SEPARATE, run, steps_of

TO_COMPARE = ["train.learning_rate=1e-4", "save_samples=100", "save_every=1", "keep_checkpoints=9"]
FSDP = ["train.backend=fsdp", "placement.train_ranks=2"]
RECIPES = Path(__file__).parents[2] / "recipes"


def actor_weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(
        folder / "checkpoints" / f"step_{step:08d}" / "actor"
    ).state_dict()


def texts(folder: Path) -> list[str]:
    """Return all completions that the run saved."""
    rows = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    return [completion["text"] for row in rows for completion in row["completions"]]


@pytest.fixture(scope="module")
def single(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train four steps on one device."""
    folder = tmp_path_factory.mktemp("single")
    run(model, folder, "steps=4", *TO_COMPARE)
    return folder


@pytest.mark.slow
def test_ranks_that_offload_train_like_one_device_and_resume_on_it(
    model: str, single: Path, tmp_path: Path
) -> None:
    run(model, tmp_path, "steps=3", *TO_COMPARE, *FSDP, "train.offload=true")
    one, two = steps_of(single), steps_of(tmp_path)
    for row in two:
        assert row["train/logprob_diff_max"] < 1e-4, "engine and trainer have different weights"
    for name in ("reward/mean", "train/loss", "train/grad_norm"):
        assert [row[name] for row in two] == pytest.approx([row[name] for row in one[:3]], abs=1e-5)
    for step in (1, 2, 3):  # the first two were written beside training
        assert largest_difference(actor_weights(single, step), actor_weights(tmp_path, step)) < 1e-5
    assert texts(tmp_path) == texts(single)[: len(texts(tmp_path))]
    run(model, tmp_path, "steps=4", *TO_COMPARE)
    assert steps_of(tmp_path)[3]["train/loss"] == pytest.approx(one[3]["train/loss"], abs=1e-5)


@pytest.mark.slow
def test_interrupted_completions_survive_train_steps_in_shared_pool(
    model: str, tmp_path: Path
) -> None:
    freedom = ["schedule.max_staleness=2", "schedule.on_sync=interrupt", "rollout.slots=8"]
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
        "data.limit=256",
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.fault("A7", "rank of the trainer killed during a run")
def test_run_names_killed_rank_of_trainer_in_separate_pool(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    killed = Run(tmp_path, "train.1")
    with pytest.raises(WorkerDied, match=r"worker 'train rank 1' died .killed by signal 9"):
        killed.train(model, *IN_FLIGHT, *SEPARATE, *FSDP)
    assert time.monotonic() - killed.killed_s < 60
    fault.fired()
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
