"""Supervised fine-tuning on Ray."""

from pathlib import Path

from tests.e2e.test_sft import run
from tests.models import random_model
from tests.small_runs import weights


def test_supervised_run_on_ray_gives_same_weights_as_local(address: str, tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    run(model, tmp_path / "local")
    run(model, tmp_path / "ray", "cluster=ray", f"ray.address={address}")
    assert weights(tmp_path / "ray", 6) == weights(tmp_path / "local", 6)
