"""Time limits of the benchmark: a case that fails or hangs is ended, and the other cases run."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.suite.cases import FULL, QUICK, Case, Work
from benchmarks.suite.choice import Choice
from benchmarks.suite.sweep import sweep
from tests.unit.test_suite_report import round_of

WORK = replace(QUICK, rounds=2, limit_s=3.0)


def scripted_case(command: str, name: str, directory: Path) -> Case:
    """Return a case whose interpreter is a shell script, called with `-m MODULE SPEC RESULT`."""
    script = directory / name
    script.write_text(f"#!/bin/sh\n{command}\n")
    script.chmod(0o755)
    return Case("queue", name, (), python=str(script))


def run(
    cases: list[Case], work: Work, directory: Path
) -> tuple[dict[str, dict[str, object]], list[str]]:
    shown: list[str] = []
    found = sweep(Choice(model="some/model"), work, cases, directory, shown.append)
    return {case["name"]: case for case in found}, shown


@pytest.fixture
def good(tmp_path: Path) -> Case:
    (tmp_path / "metrics.json").write_text(json.dumps(round_of(Case("queue", "good", ()))))
    return scripted_case(f'cp {tmp_path}/metrics.json "$4"', "good", tmp_path)


def test_sweep_runs_other_cases_when_one_fails(good: Case, tmp_path: Path) -> None:
    broken = scripted_case("exit 3", "broken", tmp_path)
    found, shown = run([broken, good], WORK, tmp_path)
    assert found["broken"]["state"] == "failed"
    assert found["broken"]["reason"] == "the process exited with code 3; see broken.log"
    assert found["good"]["state"] == "ok" and found["good"]["rounds"] == [100.0, 100.0]
    assert sum("failed in an earlier round" in text for text in shown) == 1


def test_sweep_kills_case_and_its_children_when_it_hangs(good: Case, tmp_path: Path) -> None:
    hanging = scripted_case(f"sleep 600 & echo $! > {tmp_path}/pid; wait", "hanging", tmp_path)
    found, shown = run([hanging, good], WORK, tmp_path)
    assert found["hanging"]["state"] == "failed"
    assert found["hanging"]["reason"] == "did not end within 3 s"
    assert found["good"]["state"] == "ok" and found["good"]["rounds"] == [100.0, 100.0]
    assert sum("failed in an earlier round" in text for text in shown) == 1
    with suppress(psutil.NoSuchProcess):
        # wait() raises if the child is still alive
        psutil.Process(int((tmp_path / "pid").read_text())).wait(60)


def test_sweep_skips_case_when_time_budget_is_used_up(good: Case, tmp_path: Path) -> None:
    found, _ = run([good], replace(WORK, budget_s=0.0), tmp_path)
    assert found["good"]["state"] == "skipped"
    assert "time budget" in str(found["good"]["reason"])


def test_budget_and_case_limit_fit_into_documented_time() -> None:
    assert QUICK.budget_s + QUICK.limit_s < 300 and FULL.budget_s + FULL.limit_s < 3600
