"""The findings of an audit."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# What is checked, in the order of the report.
CHECKS = {
    "files": "every line and file is readable, and its checksum is right",
    "prompts": "every issued prompt is trained once, dropped once or in flight",
    "order": "prompts are trained in order of admission, in full batches",
    "staleness": "no sample is staler than schedule.max_staleness",
    "metrics": "metrics, samples and ledger describe the same steps",
    "checkpoints": "every checkpoint is complete and belongs to this ledger",
    "evaluations": "evaluations, metrics and checkpoints/best agree",
    "summary": "the summary agrees with metrics and ledger",
}


@dataclass(frozen=True, slots=True)
class Problem:
    check: str  # a key of CHECKS
    where: str  # file, with the line if there is one: "ledger.jsonl:17"
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(slots=True)
class AuditReport:
    """What an audit found. `notes` are facts that are no errors, for example a crash."""

    run_dir: Path
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems

    def add(self, check: str, where: str, what: str) -> None:
        self.problems.append(Problem(check, where, what))

    def to_json(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.run_dir),
            "ok": self.ok,
            "counts": self.counts,
            "problems": [asdict(problem) for problem in self.problems],
            "notes": self.notes,
        }
