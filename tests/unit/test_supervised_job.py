"""Supervised runs: checks before the start, and the summary of a run that is stopped early."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import paceline
from paceline.errors import ConfigError, DataError
from paceline.observe.sinks import open_sinks
from paceline.supervised.config import load_sft_config
from paceline.supervised.display import print_summary
from paceline.supervised.job import SftJob
from paceline.supervised.recorder import LossRecorder


def test_validation_file_of_task_has_columns_of_files(tmp_path: Path) -> None:
    def check(**row: str) -> None:
        path = tmp_path / "held_out.jsonl"
        path.write_text(json.dumps(row) + "\n")
        config = load_sft_config(None, ["data.task=copy:3", f"validation.path={path}"])
        SftJob(config)._check_data()

    check(prompt="copy 123=", completion="123")
    with pytest.raises(DataError, match="no columns 'prompt' and 'completion'"):
        check(prompt="copy 123=", answer="123")


@pytest.mark.parametrize("given", [list, "sort:3"])
def test_validation_that_is_function_or_task_is_rejected(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"validation = .*expected a path, a hub dataset"):
        paceline.sft(data="sort:3", validation=given)


def test_summary_is_printed_when_run_stops_before_first_step(tmp_path: Path) -> None:
    text = printed_summary(tmp_path)
    assert "steps" in text and "loss" not in text


def test_summary_is_printed_when_validation_began_after_resume(tmp_path: Path) -> None:
    text = printed_summary(tmp_path, {"train/loss": 1.0, "validation/loss": 0.5})
    assert "validation loss" in text and "0.5000" in text


def printed_summary(run_dir: Path, *steps: dict[str, float]) -> str:
    recorder = LossRecorder(run_dir, 0, None, open_sinks((), run_dir, {}))
    for number, metrics in enumerate(steps, 1):
        recorder.step_done(number, metrics)
    summary = recorder.summary(memory_peak_bytes=0)
    recorder.close()
    console = Console(file=io.StringIO(), width=100)
    print_summary(console, summary, "runs/x", "runs/x/checkpoints/step_00000000/actor")
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]
