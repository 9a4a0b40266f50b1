"""Runs in which something never answers: each ends within a deadline and says what it waits for."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from paceline import run
from paceline.errors import StalledError, WorkerDied
from paceline.watchdog import Patience
from tests.fault_report import Fault
from tests.faults.test_workers import config
from tests.processes import children, worker_pids

ROOT = Path(__file__).parents[2]
BLOCKING = """
import time
from pathlib import Path

class Blocks:
    def __init__(self, tokenizer):
        pass

    async def run(self, prompt, generate):
        Path("{marker}").touch()
        time.sleep(1000)
"""


class Program:
    """`paceline train` with an environment that blocks the event loop."""

    def __init__(self, model: str, folder: Path, *settings: str) -> None:
        self.run_dir, self.marker = folder / "run", folder / "blocked"
        environment = folder / "environment.py"
        environment.write_text(BLOCKING.format(marker=self.marker))
        command = [sys.executable, "-m", "paceline", "train", "recipes/fully_async.toml"]
        command += [f"model={model}", f"run_dir={self.run_dir}"]
        command += ["data.task=copy:3", "data.limit=256"]
        command += [f"rollout.environment={environment}:Blocks", "placement.threads=1", *settings]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def until_blocked(self) -> None:
        deadline = time.monotonic() + 240
        while not self.marker.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def output(self) -> str:
        try:
            return self.process.communicate(timeout=240)[0]
        finally:
            self.process.kill()


@pytest.mark.fault("B6", "environment blocks the event loop")
def test_run_ends_with_stacks_when_environment_blocks_event_loop(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    program = Program(model, tmp_path, "stall_timeout_s=3")
    program.until_blocked()
    fault.fired()
    output = " ".join(program.output().split())
    fault.detected()
    assert program.process.returncode == StalledError.exit_code, output
    assert "environment.py:11 in run" in output and "(stall_timeout_s = 3)" in output
    stacks = (program.run_dir / "logs" / "stacks.txt").read_text()
    assert "environment.py" in stacks, "the controller's stacks"
    assert "worker 'train', process" in stacks and stacks.count("host.py") >= 2


@pytest.mark.fault("A13", "SIGTERM while the event loop is blocked")
def test_sigterm_ends_run_whose_event_loop_is_blocked(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    # On a thread: the test above has blocked loops with processes, which are slow to start.
    program = Program(model, tmp_path, "placement.rollout=train")
    program.until_blocked()
    program.process.terminate()
    fault.fired()
    begun = time.monotonic()
    output = program.output()
    fault.detected()
    assert program.process.returncode == 128 + signal.SIGTERM, output
    assert time.monotonic() - begun < 120 and "stopped before the first checkpoint" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "victim", "number", "error", "message"),
    [
        (
            "_restore",
            "train",
            signal.SIGSTOP,
            StalledError,
            r"loading the checkpoint took longer than start_timeout_s = 3 s; worker 'train' has "
            r"not finished actor.load for \d+ s; its process \d+ is suspended",
        ),
        (
            "open_transport",
            "rollout",
            signal.SIGSTOP,
            StalledError,
            r"connecting the trainer and the engines took .*'rollout' has not finished "
            r"weight_target.gpu for \d+ s; its process \d+ is suspended",
        ),
        (
            "open_transport",
            "rollout",
            signal.SIGKILL,
            WorkerDied,
            "'rollout' died .*SIGKILL",
        ),
    ],
)
@pytest.mark.fault("A11", "worker {victim} gets {number.name} in {stage}")
def test_start_fails_within_deadline_when_worker_is_lost(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    victim: str,
    number: signal.Signals,
    error: type[Exception],
    message: str,
    fault: Fault,
) -> None:
    chosen = config(model, tmp_path, "steps=1", "save_every=1")
    if stage == "_restore":
        asyncio.run(run.train(chosen))
    chosen = config(model, tmp_path, "steps=2")
    owner: Any = run._Run if stage == "_restore" else run
    before: Callable[..., Any] = getattr(owner, stage)

    class Limit(Patience):
        def __new__(cls, seconds: float, setting: str) -> Self:
            return super().__new__(cls, 3.0, setting)

    async def injected(*args: Any) -> Any:
        os.kill(worker_pids(tmp_path)[victim], number)
        fault.fired()
        return await before(*args)

    monkeypatch.setattr(owner, stage, injected)
    if number == signal.SIGSTOP:
        monkeypatch.setattr(run, "Patience", Limit)  # of the stages after the workers have started
    with pytest.raises(error, match=message):
        asyncio.run(run.train(chosen))
    fault.detected()
    assert not children(), "a process is left over"
