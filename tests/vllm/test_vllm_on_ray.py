"""Engines of two ranks on Ray: in a separate pool and in the ranks of the trainer."""

import asyncio
from pathlib import Path

import pytest

from paceline.run import train
from tests.models import random_model
from tests.small_runs import steps_of
from tests.vllm.test_vllm_runs import SEPARATE, check_ledger, config

pytest.importorskip("ray", reason="Ray is not installed: make test-vllm")


HYBRID = ["train.backend=fsdp", "placement.train_ranks=2", "train.offload=true"]


@pytest.mark.parametrize("placement", [SEPARATE, HYBRID], ids=["separate pool", "shared pool"])
def test_engine_of_two_ranks_on_ray_agrees_with_trainer(
    placement: list[str], tmp_path: Path
) -> None:
    # vLLM on CPUs needs heads of at least 32.
    model = random_model(tmp_path / "model", hidden=128)
    settings = ["steps=3", "cluster=ray", "rollout.tensor_parallel=2", *placement]
    chosen = config(model, tmp_path / "run", *settings)
    summary = asyncio.run(train(chosen))
    check_ledger(summary, 3, chosen.schedule.max_staleness)
    found = steps_of(tmp_path / "run")
    assert all(row["fleet/engines"] == 1 for row in found)
    assert max(row.get("train/logprob_diff_max", 0.0) for row in found) < 1e-4
