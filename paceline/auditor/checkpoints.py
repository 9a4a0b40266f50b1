"""Checkpoint directories: complete, with the right checksums, and of this run."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.auditor.history import Counts, Limits, read_limits, section
from paceline.auditor.report import AuditReport
from paceline.checksum import checksums
from paceline.line_file import read_lines

# What a file that is not what it should be raises.
UNREADABLE: tuple[type[Exception], ...] = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError),
    *(ArithmeticError, RecursionError),
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    name: str
    step: int
    # State of the run; the length is None in supervised runs, which have no ledger.
    metrics_length: int
    ledger_length: int | None
    ledger: Counts | None
    limits: Limits
    attempt: str | None  # the start of the run that wrote it


def read_checkpoints(run_dir: Path, report: AuditReport) -> list[Checkpoint]:
    """Return the intact checkpoints of this run, the oldest first; report the others.

    A run that continues from an earlier step abandons what it wrote after that step.
    """
    root, attempts = run_dir / "checkpoints", _attempts(run_dir, report)
    found = []
    for folder in sorted(path for path in root.glob("step_*") if path.is_dir()):
        problems = list(_damage(folder))
        if problems and not folder.exists():
            continue  # an active run has deleted this old checkpoint while it was read
        for name, what in problems:
            report.add("checkpoints", f"checkpoints/{folder.name}/{name}", what)
        if not problems and (checkpoint := _state(folder, report)):
            own = [n for n, (name, _) in enumerate(attempts) if name == checkpoint.attempt]
            later = attempts[own[-1] + 1 :] if own else attempts
            if all(step >= checkpoint.step for _, step in later):
                found.append(checkpoint)
            else:
                note = f"checkpoints/{folder.name} belongs to an attempt that was abandoned"
                report.notes.append(note)
    report.notes += [
        f"checkpoints/{path.name}: a checkpoint that was never completed; the next run deletes it"
        for path in sorted(root.glob(".step_*"))
    ]
    return found


def _attempts(run_dir: Path, report: AuditReport) -> list[tuple[str, int]]:
    """Return the ID of each start of the run, and the step that it continued from."""
    found: list[tuple[str, int]] = []
    path = run_dir / "attempts.jsonl"
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")
        lines = list(read_lines(path))
    except OSError as error:
        report.add("files", path.name, f"cannot be read: {error}")
        return found
    for line in lines:
        row = line.row or {}
        if isinstance(step := row.get("from_step"), int):
            found.append((str(row.get("attempt")), step))
        elif line.whole:  # otherwise a crash left it incomplete
            report.add("files", f"attempts.jsonl:{line.number}", "is damaged")
    return found


def best_step(run_dir: Path, report: AuditReport) -> int | None:
    """Return the step that checkpoints/best names."""
    link = run_dir / "checkpoints" / "best"
    if not link.is_symlink():
        return None
    name = os.readlink(link)
    if not link.is_dir() or not name.startswith("step_") or not name[5:].isdigit():
        report.add("evaluations", "checkpoints/best", f"names {name!r}, which is no checkpoint")
        return None
    return int(name[5:])


def _damage(folder: Path) -> Iterator[tuple[str, str]]:
    try:
        if not (folder / "manifest.json").is_file():
            raise FileNotFoundError("it is not a regular file")
        manifest = json.loads((folder / "manifest.json").read_bytes())
        expected: dict[str, Any] = {**manifest["files"]}
        step = int(manifest["step"])
    except UNREADABLE as error:
        yield "manifest.json", f"cannot be read: {error!r}"
        return
    if folder.name != f"step_{step:08d}":
        yield "manifest.json", f"is that of step {step}"
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
    links = [name for name, path in paths.items() if path.is_symlink()]
    yield from ((name, "is a symbolic link; expected a regular file") for name in links)
    files = {
        name: path for name, path in paths.items() if path.is_file() and name != "manifest.json"
    }
    digests = {name: _digest(path, expected.get(name)) for name, path in files.items()}
    for name in sorted(expected.keys() | digests.keys()):
        if name not in digests:
            yield name, "is missing"
        elif name not in expected:
            yield name, "is not part of the checkpoint"
        elif expected[name] != digests[name]:
            yield name, "is damaged: its checksum differs"


def _digest(path: Path, expected: Any) -> str:
    try:
        return checksums([path], {path: str(expected)})[0]
    except OSError as error:
        return str(error)


def _state(folder: Path, report: AuditReport) -> Checkpoint | None:
    where = f"checkpoints/{folder.name}/state.json"
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_bytes())
        ledger = state.get("ledger")
        checkpoint = Checkpoint(
            folder.name,
            int(state["step"]),
            int(state["metrics_length"]),
            int(ledger["length"]) if ledger else None,
            _counts(ledger) if ledger else None,
            read_limits(section(state, "config")),
            state.get("attempt"),
        )
    except UNREADABLE as error:
        report.add("checkpoints", where, f"cannot be read: {error!r}")
        return None
    if folder.name != f"step_{checkpoint.step:08d}":
        report.add("checkpoints", where, f"is that of step {checkpoint.step}")
        return None
    return checkpoint


def _counts(ledger: dict[str, Any]) -> Counts:
    dropped = {str(reason): int(count) for reason, count in ledger["dropped"].items()}
    outstanding = tuple(map(int, ledger["outstanding"]))
    return Counts(int(ledger["next_seq"]), outstanding, int(ledger["trained"]), dropped)
