"""The figures of an endurance benchmark with their limits, as a table, a file and an exit code."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, write


@dataclass(frozen=True, slots=True)
class Check:
    """A figure and its limit. Without a limit it is only reported."""

    name: str
    value: float
    sign: Literal["<=", ">=", "=="] = "<="
    limit: float | None = None

    @property
    def ok(self) -> bool:
        if self.limit is None:
            return True
        if self.sign == "==":
            return self.value == self.limit
        return self.value <= self.limit if self.sign == "<=" else self.value >= self.limit


def show(title: str, checks: Sequence[Check]) -> bool:
    """Print the table and return whether every limit is kept."""
    table = Table("figure", "value", "limit", "", title=title)
    for check in checks:
        limit = "" if check.limit is None else f"{check.sign} {check.limit:g}"
        mark = "" if check.limit is None else "ok" if check.ok else "MISSED"
        table.add_row(check.name, f"{check.value:.4g}", limit, mark)
    Console(width=100).print(table)
    return all(check.ok for check in checks)


def as_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    return [asdict(check) | {"ok": check.ok} for check in checks]


def save(name: str, content: dict[str, Any]) -> None:
    """Write a file of results. Parts of an earlier one that are not measured again stay."""
    path = RESULTS / name
    before = json.loads(path.read_text()) if path.exists() else {}
    write(path, before | content)
