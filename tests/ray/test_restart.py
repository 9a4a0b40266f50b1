"""`paceline train --restart` on Ray: workers and then the driver are killed."""

from pathlib import Path

import pytest

from tests.fault_report import Fault
from tests.faults.test_restart import survive_kills
from tests.models import random_model


@pytest.mark.fault("A7", "workers on Ray killed under --restart")
@pytest.mark.fault("A9", "driver on Ray killed under --restart")
def test_run_resumes_after_workers_and_driver_are_killed(tmp_path: Path, fault: Fault) -> None:
    model = random_model(tmp_path / "model")
    pools = ("placement.actor=train", "placement.rollout=rollout")
    survive_kills(model, tmp_path / "run", "cluster=ray", *pools)
    fault.fired()
    fault.audited(tmp_path / "run")
