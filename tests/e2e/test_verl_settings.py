"""Runs whose settings have verl's names, from a YAML file and from the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from tests.models import random_model

YAML = """
data: {train_batch_size: 4, max_prompt_length: 32, max_response_length: 4}
trainer: {total_training_steps: 2}
async_training: {staleness_threshold: 3, max_queue_size: 100, generation_timeout: 30.0}
actor_rollout_ref:
  model: {enable_gradient_checkpointing: True}
  rollout: {n: 2}
"""
OVERRIDES = [
    "data.train_batch_size=4",
    "data.max_prompt_length=32",
    "data.max_response_length=4",
    "trainer.total_training_steps=2",
    "trainer.n_gpus_per_node=0",
    "rollout.n_gpus_per_node=0",
    "async_training.staleness_threshold=3",
    "async_training.max_queue_size=100",
    "async_training.generation_timeout=30.0",
    "+actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.rollout.n=2",
]


@pytest.mark.parametrize("form", [pytest.param("yaml", marks=pytest.mark.slow), "overrides"])
def test_run_with_settings_of_verl_trains_all_steps(form: str, tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    (tmp_path / "verl.yaml").write_text(YAML)
    given = [str(tmp_path / "verl.yaml")] if form == "yaml" else ["hybrid", *OVERRIDES]
    own = [f"model={model}", f"run_dir={tmp_path}/run", "data.task=copy:3", "placement.threads=1"]
    result = CliRunner().invoke(app, ["train", *given, *own])
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["ledger"]["trained"] == 8
