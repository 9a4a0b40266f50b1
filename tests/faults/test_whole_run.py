"""A whole run as a command with its processes and run directory.

After every fault the ledger balances, and the same command resumes the run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from paceline.config import load_config
from paceline.data.source import open_source
from paceline.data.tiny import make_tokenizer
from tests import witness
from tests.audits import assert_consistent
from tests.fault_report import Fault
from tests.faults.test_workers import SETTINGS

ROOT = Path(__file__).parents[2]


class Run:
    def __init__(self, model: str, run_dir: Path, *settings: str) -> None:
        self.run_dir = run_dir
        command = [
            sys.executable,
            "-m",
            "paceline",
            "train",
            "recipes/fully_async.toml",
            f"model={model}",
            f"run_dir={run_dir}",
        ]
        self.process = subprocess.Popen(
            [*command, *SETTINGS, "reward.timeout_s=2", "save_every=5", *settings],
            cwd=ROOT,
            env=witness.environment(run_dir.with_suffix(".witness")),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def steps(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def pids(self, module: str = "") -> list[int]:
        root = psutil.Process(self.process.pid)
        processes = [root, *root.children(recursive=True)]
        return [process.pid for process in processes if module in " ".join(process.cmdline())]

    def more(self, steps: int) -> None:
        goal = self.steps + steps
        self.until(lambda: self.steps >= goal)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"no progress after step {self.steps}"
            time.sleep(0.05)


@contextmanager
def running(model: str, run_dir: Path, *settings: str) -> Iterator[Run]:
    run = Run(model, run_dir, *settings)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.communicate()


def check_ledger(run_dir: Path, bound: int = 3) -> None:
    events = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    trained = [event for event in events if event["event"] == "trained"]
    seqs = [event["seq"] for event in trained]
    assert seqs == list(range(len(trained))), "expected every prompt once, in order"
    assert all(0 <= event["staleness"] <= bound for event in trained)
    assert not any(event["event"] == "dropped" for event in events)
    metrics = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in metrics]
    assert steps == list(range(1, len(steps) + 1)) and len(trained) == 4 * len(steps)


def check_witness(model: str, run_dir: Path) -> None:
    """Check that the weights contain the prompts that the ledger has, in this order."""
    checkpoint = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    steps = witness.prompts_in(checkpoint, Path(model), run_dir.with_suffix(".witness"))
    config = load_config(ROOT / "recipes" / "fully_async.toml", SETTINGS)
    prompts = open_source(config.data, make_tokenizer(), config.seed)
    rows = [tokens for step in steps for tokens in step]
    assert rows == [list(prompts[seq].tokens) for seq in range(4 * len(steps)) for _ in range(4)]


@pytest.mark.fault("B4", "all processes of a run suspended, its queue among them")
@pytest.mark.fault("A5", "reward process killed during a run")
@pytest.mark.fault("A9", "controller killed")
def test_run_resumes_without_loss_after_suspension_and_kill(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    with running(model, tmp_path, "steps=100000") as run:
        run.more(3)
        pids = run.pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(5)  # longer than the heartbeat timeout and reward.timeout_s
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        fault.fired("B4")
        run.more(5)
        fault.recovered("B4")
        os.kill(run.pids("paceline.reward.worker")[0], signal.SIGKILL)
        fault.fired("A5")
        run.more(5)
        pids = run.pids()
        run.process.kill()
        fault.fired("A9")
        reached = run.steps
        run.process.wait()
        left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        _, left = psutil.wait_procs(left, timeout=60)
        assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    assert_consistent(tmp_path)
    log = (tmp_path / "logs" / "main.log").read_text()
    assert "unresponsive" not in log and "no reply" not in log, "the suspension counted as a hang"
    with running(model, tmp_path, f"steps={reached + 3}") as run:
        output = run.process.communicate(timeout=240)[0]
        assert run.process.returncode == 0, output
        fault.recovered("A9")
    check_ledger(tmp_path)
    assert_consistent(tmp_path)
    fault.audited(tmp_path)
    check_witness(model, tmp_path)
    assert not list((tmp_path / "checkpoints").glob(".*"))
    assert not (tmp_path / "control.sock").exists()
