"""The audit of a run directory, called at the end of tests with faults and restarts."""

from pathlib import Path

from paceline.auditor.audit import audit
from paceline.auditor.report import AuditReport


def assert_consistent(run_dir: Path) -> AuditReport:
    report = audit(run_dir)
    assert report.ok, "\n".join(map(str, report.problems))
    return report
