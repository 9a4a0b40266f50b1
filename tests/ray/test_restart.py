"""`paceline train --restart` on Ray: workers and then the driver are killed."""

from pathlib import Path

from tests.faults.test_restart import survive_kills
from tests.models import random_model


def test_run_resumes_after_workers_and_driver_are_killed(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    pools = ("placement.actor=train", "placement.rollout=rollout")
    survive_kills(model, tmp_path / "run", "cluster=ray", *pools)
