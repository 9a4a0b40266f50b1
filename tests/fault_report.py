"""Tests of faults: the fixture `fault` and the table that `--fault-report FILE` writes.

With `--fault-rows FILE`, the table also has the rows of earlier calls of pytest with that file.

The marker `fault("A2", "rollout worker killed during generation")` names a row of the fault matrix.
A marked test says through the fixture when its fault has happened, when the run has noticed it and
when it works again. It fails if it passes without its fault: then it proves nothing.
"""

import ast
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from paceline.line_file import intact_rows
from tests.audits import assert_consistent

Row = dict[str, Any]  # what xdist can send: id, what, test and the measurements

KINDS = {
    "A": "processes killed",
    "B": "processes and calls that do not answer",
    "C": "storage",
    "D": "data and rewards",
    "E": "numbers and weight versions",
    "F": "load and time",
    "G": "security",
}
# Quick ones first, Ray last: the processes of its cluster end with pytest.
ORDER = ["unit", "torture", "faults", "e2e", "contract", "slow", "gpu", "vllm", "ray"]
UNREACHED = "not run: interrupted before"
COLUMNS = ["row", "fault", "fired", "detected", "recovered", "lost", "twice", "result", "test"]
HEADER = f"""# Fault report

Every row is a test that injects a fault and proves that the fault happened. `make faults` writes
this file; [reliability.md](reliability.md) describes it. The letter of a row is its kind:
{", ".join(f"{letter} {name}" for letter, name in KINDS.items())}.

*Detected* and *recovered* are seconds after the fault, on a machine with the load below. *Lost* and
*twice* count prompts. "-" means that there is nothing to measure: the test has no run, it runs in
virtual time, or the run has to end. If several tests inject the same fault, the row has the longest
time.
"""


class Fault:
    """What a test reports about its faults. Without `row`, a call is about all its rows."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self._since: dict[str, float] = {}

    def fired(self, row: str | None = None) -> None:
        """Note that the fault has happened. Call it only where this is certain."""
        for chosen in self._chosen(row):
            chosen["fired"] = True
            self._since[chosen["id"]] = time.monotonic()

    def detected(self, row: str | None = None, seconds: float | None = None) -> None:
        """Note that the run has noticed the fault. `seconds` is for virtual time."""
        self._measure("detected", row, seconds)

    def recovered(self, row: str | None = None, seconds: float | None = None) -> None:
        """Note that the run works as before."""
        self._measure("recovered", row, seconds)

    def audited(self, run_dir: Path, row: str | None = None) -> None:
        """Audit a run and take over how many prompts it lost and trained twice."""
        counts = assert_consistent(run_dir).counts
        settled = counts["trained"] + counts["dropped"] + counts["in_flight"]
        events = intact_rows(run_dir / "ledger.jsonl")
        trained = Counter(event["seq"] for event in events if event["event"] == "trained")
        self.counted(counts["issued"] - settled, trained.total() - len(trained), row)

    def counted(self, lost: int, twice: int, row: str | None = None) -> None:
        for chosen in self._chosen(row):
            chosen |= {"lost": lost, "twice": twice}

    def check(self) -> None:
        missing = [row["id"] for row in self.rows if not row["fired"]]
        if missing:
            pytest.fail(f"the fault did not happen, so this test proves nothing: row {missing}")

    def _measure(self, what: str, row: str | None, seconds: float | None) -> None:
        for chosen in self._chosen(row):
            passed = time.monotonic() - self._since[chosen["id"]]
            chosen[what] = passed if seconds is None else seconds

    def _chosen(self, row: str | None) -> list[Row]:
        found = [chosen for chosen in self.rows if row in (None, chosen["id"])]
        assert found, f"the test has no marker for fault {row or ''}"
        return found


def fault_of(item: pytest.Item) -> Fault:
    """Read the markers of a test. `{name}` in a description is a parameter of the test."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    rows = []
    for marker in reversed(list(item.iter_markers("fault"))):
        name, what = marker.args
        assert name[:1] in KINDS and name[1:].isdigit(), f"{item.nodeid}: no fault row {name!r}"
        rows.append(_row(name, what.format(**parameters), item.nodeid))
    if rows:
        item.user_properties.append(("fault", rows))
    return Fault(rows)


def _row(name: str, what: str, test: str) -> Row:
    return {"id": name, "what": what, "test": test.partition("[")[0], "fired": False}


class FaultReport:
    """Collects the rows of all tests and writes them as a table."""

    def __init__(self, file: Path, root: Path, rows_file: Path | None = None) -> None:
        """`rows_file`: has the rows of earlier calls of pytest, and gets those of this one."""
        self._file, self._root, self._rows_file = file, root, rows_file
        self._rows: dict[tuple[str, str], Row] = {}
        self._begun = time.monotonic()
        if rows_file and rows_file.exists():
            earlier = json.loads(rows_file.read_text())
            self._begun -= earlier["seconds"]
            for row in earlier["rows"]:
                self._add(row)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._begun

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: _place(item.path.parent.name))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """List also what is not reached before an interruption."""
        for item in session.items:
            for row in dict(item.user_properties).get("fault", []):
                self._add(row | {"result": UNREACHED})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for row in dict(report.user_properties).get("fault", []):
            if report.when == "call" or not report.passed:
                self._add(row | {"result": _result(report)})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Name the rows of modules that cannot be imported here."""
        if report.skipped:
            path = self._root / report.nodeid
            for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
                for name, what in _markers(file):
                    row = _row(name, what, str(file.relative_to(self._root)))
                    self._add(row | {"result": _result(report)})

    def _add(self, row: Row) -> None:
        key = (row["id"], row["what"])
        known = self._rows.get(key)
        if known is None or known["result"] == UNREACHED:
            self._rows[key] = row
            return
        for name in ("detected", "recovered", "lost", "twice"):
            if name in row:
                known[name] = max(known.get(name, 0), row[name])
        known["fired"] &= row["fired"]
        if known["result"] == "passed":
            known["result"] = row["result"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(self.text())
        if self._rows_file:
            found = {"seconds": self._seconds, "rows": list(self._rows.values())}
            self._rows_file.write_text(json.dumps(found))
        terminalreporter.write_line(f"{self._count()}: {self._file}")

    def text(self) -> str:
        cores, load = os.cpu_count(), os.getloadavg()[2]
        machine = f"Python {sys.version.split()[0]}, {cores} cores, mean load {load:.1f}"
        taken = f"{self._seconds / 60:.1f} minutes"
        first = f"{datetime.now(UTC):%Y-%m-%d}, {machine}, {taken}. **{self._count()}.**"
        lines = [HEADER, first, ""]
        lines.append("| " + " | ".join(COLUMNS) + " |")
        lines.append("|" + "---|" * len(COLUMNS))
        rows = sorted(self._rows.values(), key=lambda row: (row["id"][0], int(row["id"][1:])))
        return "\n".join([*lines, *map(_line, rows), ""])

    def _count(self) -> str:
        results = Counter(row["result"].partition(":")[0] for row in self._rows.values())
        named = [f"{results[name]} {name}" for name in ("passed", "failed", "not run")]
        return f"{len(self._rows)} faults: {', '.join(named)}"


def _place(folder: str) -> int:
    return ORDER.index(folder) if folder in ORDER else 0


def _result(report: pytest.TestReport | pytest.CollectReport) -> str:
    if not report.skipped:
        return report.outcome
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return f"not run: {reason.removeprefix('Skipped: ')}"


def _line(row: Row) -> str:
    times = [f"{row[name]:.1f}" if name in row else "-" for name in ("detected", "recovered")]
    counts = [str(row.get(name, "-")) for name in ("lost", "twice")]
    test = row["test"].partition("tests/")[2]
    cells = [row["id"], row["what"], "yes" if row["fired"] else "no", *times, *counts]
    text = [re.sub(r"[|\n]", " ", cell) for cell in [*cells, row["result"]]]
    return "| " + " | ".join([*text, f"`{test}`"]) + " |"


def _markers(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the arguments of the markers in a module without importing it. Its parameters are
    unknown."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
            name, what = map(ast.literal_eval, node.args)
            yield name, re.sub(r"\{.*?\}", "...", what)
