"""report.html: the page of a run as one file of at most 3 MB that needs no network.

Long runs are thinned out: a point is the mean of some steps, and samples are taken evenly from the
whole run.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.line_file import read_lines
from paceline.page.document import document, embedded
from paceline.page.reader import Row, RunReader, index_entry, short

log = logging.getLogger(__name__)

NAME = "report.html"
MAX_BYTES = 3_000_000
# Of the rest, about 200,000 bytes are the page itself. The parts of all runs share these limits.
METRICS_BYTES = 900_000
DISTRIBUTIONS_BYTES = 500_000
SAMPLES_BYTES = 1_100_000
MAX_PARTS = 1024  # of samples.jsonl, from each of which a group is taken
MAX_READ = 20  # times the limit of samples that may be read to find small enough groups


def write_report(run_dirs: Sequence[Path], target: Path) -> None:
    """Write the report of one or more runs, side by side."""
    html = document({"runs": [_run(run_dir, len(run_dirs)) for run_dir in run_dirs]})
    temporary = target.parent / f".{target.name}.tmp"  # no name that a user would choose
    try:
        temporary.write_text(html, encoding="utf-8")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)  # of a failed attempt


def try_report(run_dir: Path) -> None:
    """Write the report of a run that ends. A failure is a warning, because the run is complete."""
    if not (run_dir / "metrics.jsonl").exists():  # it ended before its first step
        return
    try:
        write_report([run_dir], run_dir / NAME)
    except Exception as error:
        log.warning(
            "%s was not written: %s: %s; the results of the run are not affected. To try again: "
            "paceline report %s",
            run_dir / NAME,
            type(error).__name__,
            error,
            run_dir,
        )


def _run(run_dir: Path, runs: int) -> Row:
    reader = RunReader(run_dir)
    reader.update(samples=False)
    found = reader.since(-1, {})
    metrics, thinned = _metrics(found["metrics"], METRICS_BYTES // runs)
    groups = spread_groups(run_dir / "samples.jsonl", SAMPLES_BYTES // runs)
    return {
        **reader.description(),
        "thinned": thinned,
        "metrics": metrics,
        "distributions": _merged(found["distributions"], DISTRIBUTIONS_BYTES // runs),
        "evaluations": found["evaluations"],
        "samples": [index_entry(group) for group in groups],
        "groups": groups,
    }


def _metrics(columns: dict[str, list[Any]], limit: int) -> tuple[dict[str, list[Any]], int]:
    """Return the columns, as means of enough steps to fit the limit, and that number of steps."""
    every = _size(columns) // limit + 1
    if every == 1:
        return columns, 1
    means = {
        name: [_mean(column[at : at + every]) for at in range(0, len(column), every)]
        for name, column in columns.items()
    }
    steps = columns["step"]
    means["step"] = [steps[min(at + every, len(steps)) - 1] for at in range(0, len(steps), every)]
    return means, every


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return short(sum(known) / len(known)) if known else None


def _merged(rows: Sequence[Row], limit: int) -> list[Row]:
    """Return the distributions, with enough steps summed to fit the limit."""
    every = _size(rows) // limit + 1
    return [_sum(rows[at : at + every]) for at in range(0, len(rows), every)]


def _sum(rows: Sequence[Row]) -> Row:
    found: dict[str, dict[str, Counter[str]]] = {}
    for row in rows:
        for kind, measures in row.items():
            if kind != "step":
                for measure, counts in measures.items():
                    found.setdefault(kind, {}).setdefault(measure, Counter()).update(counts)
    return {"step": rows[-1]["step"], **found}


def spread_groups(path: Path, limit: int) -> list[Row]:
    """Return groups of at most `limit` bytes, evenly from the whole file, without reading all."""
    size = path.stat().st_size if path.exists() else 0
    if size <= limit:
        rows = [line.row for line in read_lines(path) if line.row and index_entry(line.row)]
        if _size(rows) <= limit:
            return rows
    found: dict[int, Row] = {}
    parts, used, read = 1, 0, 0
    while used < limit and parts <= MAX_PARTS and read < MAX_READ * limit:
        for number in range(1, 2 * parts, 2):  # the middles of the parts; then halve the parts
            end, row = _line_after(path, size * number // (2 * parts))
            if row is None or end in found or not index_entry(row):
                continue
            taken = _size(row)
            read += taken
            if taken > limit // 8:  # one group should not stand for the whole run
                continue
            used += taken
            if used > limit:
                break
            found[end] = row
        parts *= 2
    return [found[end] for end in sorted(found)]


def _line_after(path: Path, start: int) -> tuple[int, Row | None]:
    """Return the first line that begins after a byte, with its end."""
    for number, line in enumerate(read_lines(path, start=start)):
        if number:  # the first one is the rest of a line
            return line.end, line.row
    return 0, None


def _size(data: Any) -> int:
    return len(embedded(data))
