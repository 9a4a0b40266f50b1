"""The benchmark's plan of time: a case that fails or hangs is told and ended, and the others run."""

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

WORK = replace(QUICK, rounds=2, limit_s=1.0)


def case_that(does: str, name: str, folder: Path) -> Case:
    """A case whose interpreter is a script of ours; it is given `-m MODULE SPEC RESULT`."""
    script = folder / name
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(0o755)
    return Case("queue", name, (), python=str(script))


def run(
    cases: list[Case], work: Work, folder: Path
) -> tuple[dict[str, dict[str, object]], list[str]]:
    told: list[str] = []
    found = sweep(Choice(model="some/model"), work, cases, folder, told.append)
    return {case["name"]: case for case in found}, told


@pytest.fixture
def good(tmp_path: Path) -> Case:
    (tmp_path / "figures.json").write_text(json.dumps(round_of(Case("queue", "good", ()))))
    return case_that(f'cp {tmp_path}/figures.json "$4"', "good", tmp_path)


def test_a_case_that_fails_or_hangs_is_told_once_and_the_others_run_every_round(
    good: Case, tmp_path: Path
) -> None:
    broken, hangs = (
        case_that("exit 3", "broken", tmp_path),
        case_that(f"sleep 60 & echo $! > {tmp_path}/pid; wait", "hangs", tmp_path),
    )
    found, told = run([broken, hangs, good], WORK, tmp_path)
    assert (
        found["broken"]["state"] == "failed"
        and found["broken"]["reason"] == "its process ended with 3; see broken.log"
    )
    assert found["hangs"]["state"] == "failed" and found["hangs"]["reason"] == "not done within 1 s"
    assert found["good"]["state"] == "ok" and found["good"]["rounds"] == [100.0, 100.0]
    assert sum("it has failed before" in text for text in told) == 2, (
        "the second round does not wait for them again"
    )
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(
            10
        )  # raises if what it had started lives on


def test_what_has_no_time_left_is_skipped_with_the_reason(good: Case, tmp_path: Path) -> None:
    found, _ = run([good], replace(WORK, budget_s=0.0), tmp_path)
    assert found["good"]["state"] == "skipped" and "minutes were up" in str(found["good"]["reason"])


def test_the_last_case_to_start_ends_in_time() -> None:
    assert QUICK.budget_s + QUICK.limit_s < 300 and FULL.budget_s + FULL.limit_s < 3600
