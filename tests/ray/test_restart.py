"""`paceline train --restart` on Ray: workers and then the driver are killed."""

from pathlib import Path

import psutil
import pytest

from tests.fault_report import Fault
from tests.faults.test_restart import Supervised, survive_kills
from tests.models import random_model


@pytest.mark.fault("A7", "workers on Ray killed under --restart")
@pytest.mark.fault("A9", "driver on Ray killed under --restart")
def test_run_resumes_after_workers_and_driver_are_killed(tmp_path: Path, fault: Fault) -> None:
    model = random_model(tmp_path / "model")
    pools = ("placement.actor=train", "placement.rollout=rollout")
    survive_kills(model, tmp_path / "run", "cluster=ray", *pools)
    fault.fired()
    fault.audited(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["gcs_server", "raylet"])
@pytest.mark.fault("A10", "{victim} of Ray killed under --restart")
def test_run_resumes_after_part_of_ray_is_killed(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # instead of 60
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run_dir = tmp_path / "run"
    run = Supervised(random_model(tmp_path / "model"), run_dir, "steps=100000", "cluster=ray")
    try:
        controller = run.run()
        (found,) = [p for p in controller.children(recursive=True) if p.name() == victim]
        found.kill()
        fault.fired()
        assert not psutil.wait_procs([controller], timeout=120)[1]
        fault.detected()
        run.run()  # five more steps
        fault.recovered()
    finally:
        run.close()
    assert run.process.returncode == 143
    assert len((run_dir / "attempts.jsonl").read_text().splitlines()) == 2
    fault.audited(run_dir)
