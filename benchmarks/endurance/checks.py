"""The figures of an endurance benchmark with their limits, as a table, a file and an exit code."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parents[1] / "results"


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


def circumstances() -> dict[str, Any]:
    """Return the command, the day and the machine of a measurement."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }


def save(name: str, content: dict[str, Any]) -> None:
    """Write a file of results. Parts of an earlier one that are not measured again stay."""
    path = RESULTS / name
    before = json.loads(path.read_text()) if path.exists() else {}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(before | content, indent=1) + "\n")
