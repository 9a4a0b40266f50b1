"""A run as its operator has it: a command, its processes, its folder. Whatever hits it, the books add up, and the same command goes on."""

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

from tests.faults.test_workers import SETTINGS
from tests.models import random_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_model(tmp_path_factory.mktemp("model"))


class Run:
    def __init__(self, model: str, folder: Path, *settings: str) -> None:
        self.folder = folder
        command = [
            sys.executable,
            "-m",
            "paceline",
            "train",
            "recipes/fully_async.toml",
            f"model={model}",
            f"run_dir={folder}",
        ]
        self.process = subprocess.Popen(
            [*command, *SETTINGS, "reward.timeout_s=2", "save_every=5", *settings],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def pids(self, words: str = "") -> list[int]:
        family = [
            psutil.Process(self.process.pid),
            *psutil.Process(self.process.pid).children(recursive=True),
        ]
        return [process.pid for process in family if words in " ".join(process.cmdline())]

    def more(self, steps: int) -> None:
        goal = self.steps + steps
        self.until(lambda: self.steps >= goal)

    def until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not what():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"at step {self.steps} for too long"
            time.sleep(0.05)


@contextmanager
def running(model: str, folder: Path, *settings: str) -> Iterator[Run]:
    run = Run(model, folder, *settings)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.communicate()


def check_books(folder: Path, bound: int = 3) -> None:
    events = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    trained = [event for event in events if event["event"] == "trained"]
    assert [event["seq"] for event in trained] == list(range(len(trained))), (
        "every prompt once, in order"
    )
    assert all(0 <= event["staleness"] <= bound for event in trained) and not any(
        event["event"] == "dropped" for event in events
    )
    steps = [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, len(steps) + 1)) and len(trained) == 4 * len(steps)


def test_a_run_that_is_suspended_robbed_of_its_reward_and_killed_goes_on_and_has_lost_nothing(
    model: str, tmp_path: Path
) -> None:
    with running(model, tmp_path, "steps=100000") as run:
        run.more(3)
        everybody = run.pids()
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(5)  # longer than a worker may be silent or a reward may take
        for pid in everybody:
            os.kill(pid, signal.SIGCONT)
        run.more(5)
        os.kill(run.pids("paceline.reward.worker")[0], signal.SIGKILL)
        run.more(5)
        everybody = run.pids()
        run.process.kill()
        reached = run.steps
        run.process.wait()
        left = psutil.wait_procs(
            [psutil.Process(pid) for pid in everybody if psutil.pid_exists(pid)], timeout=5
        )[1]
        assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    said = (tmp_path / "logs" / "main.log").read_text()
    assert "silent" not in said and "no answer" not in said, (
        "nobody is blamed for the time in which all were stopped"
    )
    with running(model, tmp_path, f"steps={reached + 3}") as run:
        output = run.process.communicate(timeout=240)[0]
        assert run.process.returncode == 0, output
    check_books(tmp_path)
    assert (
        not list((tmp_path / "checkpoints").glob(".*")) and not (tmp_path / "control.sock").exists()
    )
