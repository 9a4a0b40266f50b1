"""One line of the report."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"  # runs work, or only some runs fail
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    status: Status
    found: str
    advice: str = ""  # what to do; every warning and problem has it


def ok(check: str, found: str) -> Finding:
    return Finding(check, Status.OK, found)


def warning(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Status.WARNING, found, advice)


def problem(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Status.PROBLEM, found, advice)
