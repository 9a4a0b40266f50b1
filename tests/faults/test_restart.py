"""`paceline train --restart` with real kills: the run resumes from its last commit by itself."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.fault_report import Fault
from tests.processes import children

ROOT = Path(__file__).parents[2]
SETTINGS = (
    *("groups_per_step=4", "group_size=2", "save_every=2", "save_samples=0"),
    *("data.task=copy:3", "data.limit=256"),
    *("data.max_prompt_length=32", "rollout.max_response_length=8"),
    *("placement.threads=1", "train.learning_rate=1e-3", "keep_checkpoints=1"),
)


class Supervised:
    """A supervised run in a process."""

    def __init__(self, model: str, run_dir: Path, *settings: str) -> None:
        self.run_dir = run_dir
        command = [sys.executable, "-m", "paceline", "train", "recipes/hybrid.toml"]
        command += [f"model={model}", f"run_dir={run_dir}", *SETTINGS, *settings]
        self.process = subprocess.Popen(
            [*command, "--restart", "2"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def step(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"no progress after step {self.step}"
            time.sleep(0.02)

    def run(self) -> psutil.Process:
        """Return the process of the run, once it has made five more steps."""
        goal = self.step + 5
        self.until(lambda: self.step >= goal)
        return psutil.Process(self.process.pid).children()[0]

    def end(self) -> str:
        output = self.process.communicate(timeout=240)[0]
        assert self.process.returncode == 0, output
        return output

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.communicate(timeout=240)


def check(run_dir: Path, steps: int) -> None:
    """Check that every prompt was trained once and in order, in one line of steps."""
    events = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    trained = [event["seq"] for event in events if event["event"] == "trained"]
    assert trained == list(range(4 * steps)), "expected every prompt once, in order"
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, steps + 1))


def kill_all(process: psutil.Process) -> None:
    """Kill the process and wait until its descendants have ended."""
    others = process.children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    assert not psutil.wait_procs(others, timeout=60)[1]


@pytest.mark.fault("A9", "controller killed under --restart")
def test_run_resumes_after_controller_is_killed(model: str, tmp_path: Path, fault: Fault) -> None:
    run = Supervised(model, tmp_path, "steps=40")
    try:
        kill_all(run.run())
        fault.fired()
        output = run.end()
        fault.recovered()
    finally:
        run.close()
    found = re.search(r"killed by signal 9 .* restart 1 of 2 from the checkpoint of step", output)
    assert found, output
    check(tmp_path, 40)
    fault.audited(tmp_path)
    assert not children()


@pytest.mark.fault("A11", "trainer killed during the start under --restart")
def test_run_starts_again_when_trainer_is_killed_during_start(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    pools = ("placement.actor=train", "placement.rollout=rollout")
    run = Supervised(model, tmp_path, "steps=4", *pools)
    trainers: list[psutil.Process] = []

    def started() -> bool:
        below = psutil.Process(run.process.pid).children(recursive=True)
        trainers[:] = [process for process in below if is_trainer(process, tmp_path)]
        return bool(trainers)

    try:
        run.until(started)
        trainers[0].kill()
        fault.fired()
        assert run.step == 0, "the start was over"
        output = run.end()
        fault.recovered()
    finally:
        run.close()
    assert "exit code 7 (WorkerDied)" in output and "restart 1 of 2" in output, output
    check(tmp_path, 4)
    fault.audited(tmp_path)


def test_sigterm_to_all_processes_saves_current_step(model: str, tmp_path: Path) -> None:
    """Schedulers signal every process of a job, so the run gets it directly and forwarded."""
    run = Supervised(model, tmp_path, "steps=100000", "save_every=0")
    try:
        controller = run.run()
        for process in (psutil.Process(run.process.pid), controller):
            process.send_signal(signal.SIGTERM)
        output = run.process.communicate(timeout=240)[0]
    finally:
        run.close()
    assert run.process.returncode == 143, output
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert checkpoint.name == f"step_{run.step:08d}"
    check(tmp_path, run.step)


@pytest.mark.slow
@pytest.mark.fault("A11", "trainer and then controller killed under --restart")
def test_run_resumes_after_trainer_and_controller_are_killed(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    survive_kills(model, tmp_path, "placement.actor=train", "placement.rollout=rollout")
    fault.fired()
    fault.audited(tmp_path)


def survive_kills(model: str, run_dir: Path, *settings: str) -> None:
    """Kill the trainer, then the controller, and check that the run reaches its end."""
    run = Supervised(model, run_dir, "steps=80", *settings)
    try:
        controller = run.run()
        for process in controller.children(recursive=True):
            if is_trainer(process, run_dir):
                os.kill(process.pid, signal.SIGKILL)
        psutil.wait_procs([controller], timeout=120)
        kill_all(run.run())
        output = run.end()
    finally:
        run.close()
    assert "exit code 7 (WorkerDied)" in output and "killed by signal 9" in output
    check(run_dir, 80)


def is_trainer(process: psutil.Process, run_dir: Path) -> bool:
    """Return whether a process is the worker with the actor, or any worker on Ray."""
    try:
        log = os.path.realpath(f"/proc/{process.pid}/fd/1")
        return log == str((run_dir / "logs" / "train.log").resolve()) or (
            "ray::RayHost" in " ".join(process.cmdline())
        )
    except (psutil.Error, OSError):
        return False
