"""The table of faults: what it says about tests that pass, fail, are skipped or prove nothing."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
from tests.conftest import *

@pytest.mark.fault("A10", "worker {name} killed")
@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("repeated", [1, 2])
def test_recovers(fault, name, repeated):
    fault.fired()
    fault.detected(seconds=1.0 * repeated)
    fault.recovered(seconds=2.5)
    fault.counted(lost=0, twice=0)

@pytest.mark.fault("A2", "nothing happens")
def test_proves_nothing(fault):
    pass

@pytest.mark.fault("B1", "first | of two")
@pytest.mark.fault("B2", "second of two")
def test_two_faults(fault):
    fault.fired("B2")
    fault.fired("B1")
    fault.detected("B1", seconds=4)
    assert fault.rows[1]["what"] != "second of two"

@pytest.mark.fault("C1", "no such device")
@pytest.mark.skipif(True, reason="needs a device")
def test_skipped(fault):
    fault.fired()
"""
MISSING = """
import pytest
pytest.importorskip("no_such_package", reason="no_such_package is not installed")

@pytest.mark.fault("F1", "package {name} missing")
def test_not_imported(fault):
    pass
"""


def run(folder: Path, *options: str) -> str:
    (folder / "conftest.py").write_text("from tests.conftest import *")
    (folder / "test_faults.py").write_text(TESTS)
    (folder / "test_missing.py").write_text(MISSING)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    command += ["--fault-report", "report.md", "-m", "fault", *options, "."]
    env = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert " faults: " in done.stdout, done.stdout
    return (folder / "report.md").read_text()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(tmp_path_factory.mktemp("tests"))


def line(report: str, start: str) -> str:
    (found,) = [line for line in report.splitlines() if line.startswith(f"| {start} |")]
    return found


def test_row_of_same_fault_has_longest_time_of_its_tests(report: str) -> None:
    expected = "| yes | 2.0 | 2.5 | 0 | 0 | passed |"
    assert expected in line(report, "A10 | worker one killed")
    assert expected in line(report, "A10 | worker two killed")


def test_marked_test_fails_when_its_fault_did_not_happen(report: str) -> None:
    assert line(report, "A2").startswith("| A2 | nothing happens | no | - | - | - | - | failed |")


def test_test_with_two_faults_has_two_rows_and_both_need_proof(report: str) -> None:
    assert "| yes | 4.0 | - | - | - | failed |" in line(report, "B1 | first   of two")
    assert "| yes | - | - | - | - | failed |" in line(report, "B2")


def test_fault_that_cannot_be_injected_here_is_not_run_and_has_reason(report: str) -> None:
    assert "| no | - | - | - | - | not run: needs a device |" in line(report, "C1")
    assert "not run: no_such_package is not installed" in line(report, "F1")


def test_rows_are_counted_and_sorted(report: str) -> None:
    assert "**7 faults: 2 passed, 3 failed, 2 not run.**" in report
    rows = [line.split()[1] for line in report.splitlines() if line.startswith("| ")]
    assert rows == ["row", "A2", "A10", "A10", "B1", "B2", "C1", "F1"]


def test_report_lists_faults_that_were_not_reached_when_interrupted(tmp_path: Path) -> None:
    report = run(tmp_path, "--exitfirst")
    assert "**7 faults: 2 passed, 1 failed, 4 not run.**" in report
    assert "not run: interrupted before" in line(report, "B2")


def test_report_joins_rows_of_several_calls(tmp_path: Path) -> None:
    rows = ("--fault-rows", "rows.json")
    first = run(tmp_path, *rows, "-n", "1", "--deselect", "test_faults.py::test_two_faults")
    assert "**5 faults: 2 passed, 1 failed, 2 not run.**" in first
    joined = run(tmp_path, *rows, "-k", "two_faults")
    assert "**7 faults: 2 passed, 3 failed, 2 not run.**" in joined
    assert line(joined, "A10 | worker one killed") == line(first, "A10 | worker one killed")


def test_report_says_how_long_all_calls_took(tmp_path: Path) -> None:
    earlier = {"seconds": 1800.0, "rows": []}
    (tmp_path / "rows.json").write_text(json.dumps(earlier))
    found = re.search(r"([\d.]+) minutes", run(tmp_path, "--fault-rows", "rows.json"))
    assert found and 30 <= float(found[1]) < 35
