"""`paceline train --restart` on Ray: workers, the driver and Ray itself are killed."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.fault_report import Fault
from tests.faults.test_restart import Supervised, check, survive_kills
from tests.models import random_model


@pytest.mark.fault("A7", "workers on Ray killed under --restart")
@pytest.mark.fault("A9", "driver on Ray killed under --restart")
def test_run_resumes_after_workers_and_driver_are_killed(tmp_path: Path, fault: Fault) -> None:
    model = random_model(tmp_path / "model")
    pools = ("placement.actor=train", "placement.rollout=rollout")
    survive_kills(model, tmp_path / "run", "cluster=ray", *pools)
    text = (tmp_path / "run" / "logs" / "main.log").read_text()
    assert "2 worker processes have started early" in text
    fault.fired()
    fault.audited(tmp_path / "run")


@pytest.mark.parametrize("victim", ["gcs_server", "raylet"])
@pytest.mark.fault("A10", "{victim} of the Ray session killed under --restart")
def test_run_resumes_in_new_session_when_ray_is_killed(
    victim: str, tmp_path: Path, fault: Fault
) -> None:
    model, run_dir = random_model(tmp_path / "model"), tmp_path / "run"
    pools = ("placement.actor=train", "placement.rollout=rollout")
    run = Supervised(model, run_dir, "steps=100000", "cluster=ray", *pools)
    try:
        controller = run.run()
        below = controller.children(recursive=True)
        (process,) = [process for process in below if process.name() == victim]
        os.kill(process.pid, signal.SIGKILL)
        fault.fired()
        assert not psutil.wait_procs([controller], timeout=60)[1], "the run did not notice it"
        fault.detected()
        run.run()
        fault.recovered()
        run.process.send_signal(signal.SIGTERM)
        output = run.process.communicate(timeout=120)[0]
    finally:
        run.close()
    assert run.process.returncode == 143, output
    assert "restart 1 of 2 from the checkpoint of step" in output, output
    assert not psutil.wait_procs(below, timeout=20)[1], "a process of the killed session is left"
    check(run_dir, run.step)
    fault.audited(run_dir)
