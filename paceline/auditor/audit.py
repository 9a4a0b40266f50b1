"""`paceline audit`: reads the files of a run and checks that they tell one consistent story.

Waits for nothing and changes nothing. A run that is still active, or that was killed, may have
written the last step to one file and not yet to another; such a last step is not an error.
"""

import fcntl
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.auditor.agreement import (
    DISTRIBUTIONS,
    EVALUATIONS,
    JUDGE,
    KEYS,
    METRICS,
    SAMPLES,
    check_evaluations,
    check_metrics,
    check_samples,
    check_steps,
)
from paceline.auditor.checkpoints import Checkpoint, best_step, read_checkpoints
from paceline.auditor.history import FILE as LEDGER
from paceline.auditor.history import Counts, History, read_limits, section
from paceline.auditor.report import AuditReport
from paceline.errors import CheckpointError
from paceline.line_file import Line, read_lines


def audit(run_dir: str | Path) -> AuditReport:
    """Check a run directory and return the report; `report.ok` is true if there is no problem.

    Reads every file of every checkpoint.
    """
    folder = Path(run_dir)
    check_is_run(folder)
    return _Audit(folder, AuditReport(folder)).run()


def check_is_run(folder: Path) -> None:
    """Raise CheckpointError for a directory without files of a run."""
    if not any((folder / name).exists() for name in ("settings.json", METRICS)):
        raise CheckpointError(
            f"run_dir = {folder} has no settings.json and no metrics.jsonl; expected the directory "
            "of a run, for example runs/fully_async"
        )


@dataclass
class _Audit:
    folder: Path
    report: AuditReport
    _open: list[str] = field(default_factory=list)  # files whose last line is incomplete

    def run(self) -> AuditReport:
        report, config = self.report, self._json("settings.json") or {}
        summary = self._json("summary.json", required=False)
        supervised = "rows_per_step" in config
        metrics = self._lines(METRICS)
        check_steps(metrics, report)
        checkpoints = read_checkpoints(self.folder, report)
        history = History(read_limits(config), report)
        if not supervised:
            lengths = {c.ledger_length for c in checkpoints if c.ledger_length is not None}
            for line in self._lines(LEDGER):
                history.read(line, lengths)
        if active := self._active:
            report.notes.append("a run is active in this directory; its last steps are incomplete")
        self._check_checkpoints(checkpoints, history, metrics)
        steps = _last_step(metrics)
        ended = self._check_summary(summary, steps, history, checkpoints)
        if not supervised:
            self._check_last_batch(history, ended)
            check_metrics(metrics, history, report, complete=ended, active=active)
            check_samples(self._lines(SAMPLES, required=False), history, report)
        self._lines(DISTRIBUTIONS, required=False)
        evaluations = self._lines(EVALUATIONS, required=False)
        keeps_best = bool(section(config, "evaluation").get("keep_best"))
        best = best_step(self.folder, report) if keeps_best else None
        scores = section(summary or {}, "evaluation") if ended else {}
        check_evaluations(evaluations, metrics, best, scores, report)
        if ended:
            for name in self._open:
                report.add("files", name, "ends with an incomplete line, but the run has ended")
        self._lines(JUDGE, required=False)  # may keep an incomplete line of a killed run
        self._count(history, steps, checkpoints, evaluations, supervised)
        return report

    def _is_file(self, name: str, required: bool) -> bool:
        """Return whether there is a regular file; a pipe would let the audit wait for ever."""
        path = self.folder / name
        if path.exists() and not path.is_file():
            self.report.add("files", name, "is not a regular file")
        elif required and not path.exists():
            self.report.add("files", name, "is missing")
        return path.is_file()

    def _json(self, name: str, required: bool = True) -> dict[str, Any] | None:
        if not self._is_file(name, required):
            return None
        try:
            content = json.loads((self.folder / name).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            self.report.add("files", name, f"cannot be read: {error}")
            return None
        if not isinstance(content, dict):
            self.report.add("files", name, "is not a table")
            return None
        return content

    def _lines(self, name: str, required: bool = True) -> list[Line]:
        """Return the complete lines, with the keys that are compared; report damaged ones."""
        if not self._is_file(name, required):
            return []
        try:
            lines = [_kept(line, KEYS.get(name)) for line in read_lines(self.folder / name)]
        except OSError as error:
            self.report.add("files", name, f"cannot be read: {error}")
            return []
        if lines and not lines[-1].whole:
            self.report.notes.append(f"{name}: the last line is incomplete")
            self._open.append(name)
            lines.pop()
        for line in lines:
            if line.row is None:
                self.report.add("files", f"{name}:{line.number}", "is damaged")
        return lines

    @property
    def _active(self) -> bool:
        """Whether a run has locked the directory."""
        try:
            with (self.folder / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass  # no run, or a file system without locks
        return False

    def _check_checkpoints(
        self, checkpoints: list[Checkpoint], history: History, metrics: list[Line]
    ) -> None:
        steps = {line.end: (line.row or {}).get("step") for line in metrics}
        for checkpoint in checkpoints:
            where, length = f"checkpoints/{checkpoint.name}", checkpoint.metrics_length
            if checkpoint.limits != history.limits:
                problem = f"has {checkpoint.limits}, but settings.json has {history.limits}"
                self.report.add("checkpoints", where, problem)
            if length not in steps:
                problem = f"metrics.jsonl has no line that ends at byte {length}"
                self.report.add("checkpoints", where, problem)
            elif steps[length] not in (checkpoint.step, None):
                problem = f"metrics.jsonl has step {steps[length]} where this step should end"
                self.report.add("checkpoints", where, problem)
            if checkpoint.ledger_length is None or checkpoint.ledger is None:
                continue
            found = history.at.get(checkpoint.ledger_length)
            if checkpoint.ledger_length == 0:
                found = Counts(0, (), 0, {})
            if found is None:
                problem = f"{LEDGER} has no line that ends at byte {checkpoint.ledger_length}"
                self.report.add("checkpoints", where, problem)
            elif found != checkpoint.ledger:
                problem = f"state.json has {checkpoint.ledger}, but {LEDGER} has {found}"
                self.report.add("checkpoints", where, problem)

    def _check_summary(
        self,
        summary: dict[str, Any] | None,
        steps: int,
        history: History,
        checkpoints: list[Checkpoint],
    ) -> bool:
        """Return whether the summary describes the end of the run, and check it if it does."""
        if summary is None:
            self.report.notes.append("there is no summary.json: the run has not ended by itself")
            return False
        if summary.get("steps") != steps:
            self.report.notes.append(
                f"summary.json is that of {summary.get('steps')} steps; metrics.jsonl has {steps}"
            )
            return False
        if steps and not any(checkpoint.step == steps for checkpoint in checkpoints):
            problem = f"the run has ended after step {steps}, whose checkpoint is missing"
            self.report.add("checkpoints", "checkpoints", problem)
        counts, ledger = history.counts(), summary.get("ledger")
        if ledger is None:
            return True
        found = {
            "issued": counts.issued,
            "trained": counts.trained,
            "dropped": counts.dropped,
            "outstanding": len(counts.outstanding),
        }
        if found == ledger:
            return True
        if any(_resumed(c, history) for c in checkpoints if c.step == steps):
            self.report.notes.append("the run was resumed after summary.json was written")
            return False
        self.report.add("summary", "summary.json", f"has {ledger}, but {LEDGER} has {found}")
        return True

    def _check_last_batch(self, history: History, ended: bool) -> None:
        if history.steps:
            last = max(history.steps)
            # A killed run may have written a part of the last step.
            if ended or len(history.steps[last]) > (history.limits.groups_per_step or 0):
                history.check_batch(last)

    def _count(
        self,
        history: History,
        steps: int,
        checkpoints: list[Checkpoint],
        evaluations: list[Line],
        supervised: bool,
    ) -> None:
        counts = history.counts()
        self.report.counts = {"steps": steps}
        if not supervised:
            self.report.counts |= {
                "issued": counts.issued,
                "trained": counts.trained,
                "dropped": sum(counts.dropped.values()),
                "in_flight": len(counts.outstanding),
            }
        self.report.counts |= {"checkpoints": len(checkpoints), "evaluations": len(evaluations)}


def _kept(line: Line, keys: set[str] | None) -> Line:
    if keys is None or line.row is None:
        return line
    return replace(line, row={key: line.row[key] for key in keys & line.row.keys()})


def _resumed(checkpoint: Checkpoint, history: History) -> bool:
    """Return whether the first event after a checkpoint is the first one of a resumed run."""
    if checkpoint.ledger is None or checkpoint.ledger_length is None:
        return False
    first = "reissued" if checkpoint.ledger.outstanding else "issued"
    return history.next_event.get(checkpoint.ledger_length) == first


def _last_step(metrics: list[Line]) -> int:
    steps = [_number((line.row or {}).get("step")) or 0 for line in metrics]
    return max(steps, default=0)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
