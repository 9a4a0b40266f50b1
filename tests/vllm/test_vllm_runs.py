"""Whole runs with vLLM: fully async, hybrid on one pool, adapters, a killed engine, a wrong tensor.

vLLM takes half of each test's time to start, so each run checks several properties.
"""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.config import RunConfig, load_config
from paceline.errors import ConfigError, MismatchError, PacelineError
from paceline.run import train
from paceline.training.phases import MEASURED
from tests.fault_report import Fault
from tests.models import random_model
from tests.processes import children, worker_pids
from tests.small_runs import OnStep, steps_of
from tests.vllm import faults

SEPARATE = [
    "placement.actor=train",
    "placement.rollout=rollout",
    "schedule.max_staleness=2",
    "schedule.on_sync=swap",
]
SMALL = [
    "rollout.engine=vllm",
    "groups_per_step=4",
    "group_size=4",
    "data.task=copy:3",
    "data.limit=256",
    "data.max_prompt_length=32",
    "rollout.max_response_length=16",
    "rollout.temperature=0.8",
    "train.learning_rate=1e-3",
    "placement.threads=1",
    f"reward.function={Path(__file__).parents[1]}/rewards.py:letters",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    # vLLM on CPUs needs heads of at least 32.
    return random_model(tmp_path_factory.mktemp("model"), hidden=128)


@pytest.fixture(autouse=True)
def no_child_processes_remain() -> Any:
    yield
    assert not children()


def config(model: str, directory: Path, *settings: str) -> RunConfig:
    return load_config(None, [f"model={model}", f"run_dir={directory}", *SMALL, *settings])


def check_ledger(summary: dict[str, Any], steps: int, max_staleness: int) -> None:
    assert summary["steps"] == steps and 0 <= summary["staleness_max"] <= max_staleness
    ledger = summary["ledger"]
    assert ledger["trained"] == 4 * steps and not ledger["dropped"]
    assert ledger["issued"] == ledger["trained"] + ledger["outstanding"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_fully_async_run_balances_ledger_and_engine_agrees_with_trainer(
    ranks: int, model: str, tmp_path: Path
) -> None:
    settings = ["steps=10", f"rollout.tensor_parallel={ranks}", *SEPARATE]
    summary = asyncio.run(train(config(model, tmp_path, *settings)))
    check_ledger(summary, 10, 2)
    fresh = [row for row in steps_of(tmp_path) if "train/logprob_diff_max" in row]
    assert fresh and all(
        row["train/logprob_diff_max"] < 1e-3 and row["train/mismatch_outlier_fraction"] == 0
        for row in fresh
    )


@pytest.mark.parametrize(
    "adapters", [[], ["train.lora.rank=4", "train.learning_rate=1e-2"]], ids=["all weights", "lora"]
)
def test_hybrid_run_alternates_phases_and_reports_their_memory(
    adapters: list[str], model: str, tmp_path: Path
) -> None:
    summary = asyncio.run(
        train(config(model, tmp_path, "steps=4", "train.offload=true", *adapters))
    )
    check_ledger(summary, 4, 0)
    for row in steps_of(tmp_path):
        assert row["train/logprob_diff_max"] < 1e-3, "the engine did not have the trainer's weights"
    for row in steps_of(tmp_path)[:MEASURED]:
        assert min(row[f"memory/{phase}_bytes"] for phase in ("generate", "train", "sync")) > 0
    assert set(summary["memory_phases"]) == {"start", "generate", "train", "sync"}
    assert all(row["train/weights_changed"] == 1 for row in steps_of(tmp_path))


@pytest.mark.parametrize(("ranks", "victim"), [(1, "rollout"), (2, "rollout.1")])
@pytest.mark.fault("A2", "vLLM engine of {ranks} ranks killed")
def test_run_replaces_killed_engine_or_fails_with_its_name(
    ranks: int, victim: str, model: str, tmp_path: Path, fault: Fault
) -> None:
    killed: list[float] = []

    def kill(step: int) -> None:
        if step == 2:
            os.kill(worker_pids(tmp_path)[victim], signal.SIGKILL)
            fault.fired()
            killed.append(time.monotonic())

    try:
        # The collective transport must reach both the old and the new engine.
        settings = ["steps=6", "sync.transport=collective", f"rollout.tensor_parallel={ranks}"]
        chosen = config(model, tmp_path, *settings, *SEPARATE)
        summary = asyncio.run(asyncio.wait_for(train(chosen, lambda _: OnStep(kill)), 300))
        assert summary["steps"] == 6 and summary["ledger"]["trained"] == 24, (
            "after recovery, every prompt must be trained once"
        )
    except PacelineError as error:
        assert killed and "rollout" in str(error) and time.monotonic() - killed[0] < 120, error
    assert killed


@pytest.mark.fault("E5", "one tensor of vLLM is wrong")
def test_run_fails_within_one_step_when_engine_has_wrong_tensor(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr("paceline.workers.local.build_parts", faults.build_with_a_wrong_tensor)
    with pytest.raises(
        MismatchError, match=r"step 3: engine and trainer do not have the same weights"
    ):
        asyncio.run(train(config(model, tmp_path, "steps=6", "train.offload=true")))
    fault.fired()
    assert len(steps_of(tmp_path)) == 2


@pytest.mark.parametrize(("staleness", "transport"), [(0, "auto"), (2, "auto"), (0, "stream")])
def test_run_fails_within_one_step_when_one_rank_has_wrong_shard(
    staleness: int, transport: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.workers.local.build_parts", faults.build_with_a_wrong_shard)
    settings = ["steps=6", "rollout.tensor_parallel=2", f"sync.transport={transport}", *SEPARATE]
    chosen = config(model, tmp_path, *settings, f"schedule.max_staleness={staleness}")
    with pytest.raises(MismatchError, match=r"do not have the same weights .*version 2|step 3: .*"):
        asyncio.run(train(chosen))
    # Two steps before the engine got version 2. An asynchronous trainer may have made the third.
    assert len(steps_of(tmp_path)) in ([2] if staleness == 0 else [2, 3])


def test_train_rejects_unsupported_vllm_version_before_start(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.rollout.vllm_settings.version", lambda package: "0.19.1")
    with pytest.raises(
        ConfigError, match=r"vllm 0\.19\.1 is not supported; expected 0\.24 to 0\.32"
    ):
        asyncio.run(train(config(model, tmp_path)))
