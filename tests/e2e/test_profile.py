"""Torch profiles of chosen steps, written by every worker."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config import load_config
from paceline.errors import ConfigError
from tests.small_runs import SEPARATE, run


def operations(path: Path) -> set[str]:
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "cpu_op"}


def test_every_worker_writes_a_profile_of_chosen_steps(model: str, tmp_path: Path) -> None:
    ahead = ["schedule.max_staleness=1", "profile_steps=2:3"]
    run(model, tmp_path / "run", "steps=4", *SEPARATE, *ahead)
    files = {path.name: path for path in (tmp_path / "run" / "profile").iterdir()}
    assert len(files) == 2 and all(name.endswith("_steps_2-3.json.gz") for name in files)
    assert all(operations(path) for path in files.values())
    trainer = next(path for name, path in files.items() if name.startswith("train"))
    assert any("Backward" in name for name in operations(trainer))


def test_profile_is_written_when_run_ends_before_last_profiled_step(
    model: str, tmp_path: Path
) -> None:
    run(model, tmp_path / "run", "steps=2", "profile_steps=1:9")
    (path,) = (tmp_path / "run" / "profile").iterdir()
    assert operations(path)


def test_run_without_setting_writes_no_profile(model: str, tmp_path: Path) -> None:
    run(model, tmp_path / "run", "steps=1")
    assert not (tmp_path / "run" / "profile").exists()


@pytest.mark.parametrize("value", ["3:2", "10", "0:2", "a:b"])
def test_wrong_steps_are_rejected(value: str) -> None:
    with pytest.raises(ConfigError, match="profile_steps"):
        load_config(None, ["model=tiny", "data.task=reverse:5", f"profile_steps={value}"])
