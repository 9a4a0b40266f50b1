"""Rewards in whole runs: functions that hang, weighted sums, and memory."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.line_file import intact_rows

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {
    "data": "copy:3",
    "steps": 2,
    "groups_per_step": 2,
    "group_size": 2,
    "data.limit": 256,
    "rollout.max_response_length": 4,
    "placement.threads": 1,
    "display": False,
}
PROGRAM = """
import time, paceline

def hang(completion, row):
    print("hanging", flush=True)
    time.sleep(1000)

paceline.train(reward=hang, **{settings!r})
"""


def start(**settings: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(settings=SETTINGS | settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_train_raises_when_function_of_program_sleeps(model: str, tmp_path: Path) -> None:
    settings = {"model": model, "run_dir": str(tmp_path / "run"), "reward.timeout_s": 1.0}
    with start(**settings) as program:
        assert program.stdout is not None and program.stdout.readline().startswith("hanging")
        begun = time.monotonic()
        _, errors = program.communicate(timeout=240)
    assert "no reply within 1 s (reward.timeout_s)" in errors
    assert time.monotonic() - begun < 60


def test_interrupt_ends_program_whose_reward_sleeps(model: str, tmp_path: Path) -> None:
    with start(model=model, run_dir=str(tmp_path / "run")) as program:
        assert program.stdout is not None and program.stdout.readline().startswith("hanging")
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=240)
    assert "KeyboardInterrupt" in errors


def test_train_records_value_of_each_function(model: str, tmp_path: Path) -> None:
    def length(completion: str, row: Mapping[str, Any]) -> float:
        return len(completion)

    def sometimes(completion: str, row: Mapping[str, Any]) -> float | None:
        return None if "1" in row["prompt"] else 1.0

    run = paceline.train(
        model=model,
        run_dir=str(tmp_path / "run"),
        reward=[(length, 0.5), "exact", (sometimes, 2.0)],
        **SETTINGS,
    )
    for row in run.metrics:
        assert {"reward_component/length", "reward_component/exact"} <= row.keys()
    samples = list(intact_rows(run.run_dir / "samples.jsonl"))
    assert len(samples) == 2
    for sample in samples:
        known = {} if "1" in sample["prompt"] else {"sometimes": 1.0}
        for each in sample["completions"]:
            parts = each["details"]
            assert parts == {"length": len(each["text"]), "exact": parts["exact"], **known}
            expected = 0.5 * parts["length"] + parts["exact"] + 2 * known.get("sometimes", 0)
            assert each["reward"] == pytest.approx(expected)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read through /proc")
def test_peak_memory_includes_reward_processes(model: str, tmp_path: Path) -> None:
    def peak(function: str) -> int:
        run = paceline.train(
            model=model,
            run_dir=str(tmp_path / function),
            reward=f"{ROOT}/tests/rewards.py:{function}",
            **SETTINGS,
        )
        return int(run.summary["memory_peak_bytes"])

    assert peak("allocates") > peak("letters") + 300e6
