"""Files that describe the same steps: metrics, samples and evaluations against the ledger."""

import math
from typing import Any

from paceline.auditor.history import FILE as LEDGER
from paceline.auditor.history import History
from paceline.auditor.report import AuditReport
from paceline.line_file import Line

METRICS, SAMPLES, EVALUATIONS = "metrics.jsonl", "samples.jsonl", "evaluations.jsonl"
DISTRIBUTIONS, JUDGE = "distributions.jsonl", "judge.jsonl"
# The keys of each file that are compared; a long run has many lines with much text.
KEYS: dict[str, set[str]] = {
    DISTRIBUTIONS: set(),
    JUDGE: set(),
    METRICS: {"step", "staleness/mean", "staleness/max", "evaluation/step", "evaluation/reward"},
    SAMPLES: {"step", "seq", "uid", "staleness"},
}


def check_metrics(
    lines: list[Line], history: History, report: AuditReport, *, complete: bool, active: bool
) -> None:
    """Compare the lines with the steps of the ledger.

    `complete`: the run has ended. A killed run may lack the last step in one of the files; while
    the run is active, more steps may be added between reading the two.
    """
    trained, recorded = len(history.steps), 0
    for line in lines:
        row = line.row or {}
        step = row.get("step")
        if not isinstance(step, int):
            continue
        recorded = max(recorded, step)
        groups = history.steps.get(step - 1, [])
        if len(groups) != history.limits.groups_per_step:
            continue  # a partial last step; the ledger's own check reports others
        ages = [group.staleness for group in groups]
        for name, value in (("mean", sum(ages) / len(ages)), ("max", max(ages))):
            found = row.get(f"staleness/{name}")
            if not _equal(found, value):
                problem = f"staleness/{name} is {found}, but {LEDGER} has {value:g}"
                report.add("metrics", f"{METRICS}:{line.number}", problem)
    allowed = 0 if complete else 1
    if abs(trained - recorded) > allowed and not active:
        problem = f"has {recorded} steps, but {LEDGER} has {trained}"
        report.add("metrics", METRICS, problem)


def check_steps(lines: list[Line], report: AuditReport) -> None:
    """Report steps that are missing, repeated or out of order."""
    last = 0
    for line in lines:
        step = (line.row or {}).get("step")
        if line.row is None:
            last += 1  # a damaged line is reported once
        elif step != last + 1:
            problem = f"step {step} follows step {last}"
            report.add("metrics", f"{METRICS}:{line.number}", problem)
            last = step if isinstance(step, int) else last + 1
        else:
            last += 1


def check_samples(lines: list[Line], history: History, report: AuditReport) -> None:
    """Compare saved completions with the training of their prompt."""
    last: Any = 0
    for line in lines:
        row, where = line.row or {}, f"{SAMPLES}:{line.number}"
        step = row.get("step")
        if not isinstance(step, int):
            continue
        if step < last:
            report.add("metrics", where, f"step {step} follows step {last}")
        last = step
        groups = history.steps.get(step - 1)
        if groups is None or len(groups) != history.limits.groups_per_step:
            continue  # not yet in the ledger
        group = next((group for group in groups if group.seq == row.get("seq")), None)
        if group is None:
            problem = f"prompt {row.get('seq')} was not trained in step {step}"
            report.add("metrics", where, problem)
        elif (group.uid, group.staleness) != (row.get("uid"), row.get("staleness")):
            problem = f"{row.get('uid')}, staleness {row.get('staleness')}"
            report.add("metrics", where, f"has {problem}, but {LEDGER} has {group}")


def check_evaluations(
    lines: list[Line],
    metrics: list[Line],
    best: int | None,
    summary: dict[str, Any],
    report: AuditReport,
) -> None:
    """Compare the evaluations with those in metrics, the best checkpoint and the summary."""
    rows: dict[int, dict[str, Any]] = {}
    for line in lines:
        row, where = line.row or {}, f"{EVALUATIONS}:{line.number}"
        step, reward = row.get("step"), row.get("reward")
        if line.row is None:
            continue
        if not isinstance(step, int) or not isinstance(reward, float | int):
            report.add("evaluations", where, "has no step or no reward")
        elif rows and step <= max(rows):
            report.add("evaluations", where, f"step {step} follows step {max(rows)}")
        else:
            rows[step] = row
    _check_reported(rows, metrics, report)
    if not rows:
        return
    highest = max(rows.values(), key=lambda row: row["reward"])
    if best is not None and summary and best != highest["step"]:
        problem = f"names step {best}, but the evaluation of step {highest['step']} is the best"
        report.add("evaluations", "checkpoints/best", problem)
    ends = {"first": rows[min(rows)], "last": rows[max(rows)], "best": highest}
    for name, row in ends.items():
        if summary and summary.get(name) != row:
            problem = f"evaluation.{name} differs from {EVALUATIONS}, step {row['step']}"
            report.add("evaluations", "summary.json", problem)


def _check_reported(
    rows: dict[int, dict[str, Any]], metrics: list[Line], report: AuditReport
) -> None:
    """Compare the evaluations that metrics report, in the step after the result."""
    for line in metrics:
        row, where = line.row or {}, f"{METRICS}:{line.number}"
        step, reported_in = row.get("evaluation/step"), row.get("step")
        if step is None:
            continue
        found = next((rows[at] for at in rows if at == step), None)
        if found is None and isinstance(step, float | int) and rows and step < min(rows):
            continue  # of the run that this one was branched from, whose evaluations are elsewhere
        if found is None or (isinstance(reported_in, int) and found["step"] >= reported_in):
            problem = f"reports an evaluation of step {step}, which {EVALUATIONS} does not have"
            report.add("evaluations", where, problem)
        elif not _equal(row.get("evaluation/reward"), found["reward"]):
            problem = f"evaluation/reward is {row.get('evaluation/reward')}; {EVALUATIONS} has "
            report.add("evaluations", where, f"{problem}{found['reward']}")


def _equal(found: Any, expected: float) -> bool:
    """Return whether a number of metrics, which has 6 digits, is the expected one."""
    if not isinstance(found, float | int):
        return found is None and not math.isfinite(expected)
    return math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-9)
