"""Trace of a run: trace.jsonl, written during the run, and the file that Perfetto shows.

All times are those of the controller's clock. A row has the name of what happened, where (process
and thread, as Perfetto calls its tracks), when it began and how many seconds it took.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.line_file import LineFile, intact_rows
from paceline.remote.worker import Worker

FILE = "trace.jsonl"
CONTROLLER, GROUPS, EVALUATION = "controller", "groups", "evaluation"
DROPPED = "dropped: "
THREADS = ("worker", "engine beside training")  # of a worker; most have one

Row = dict[str, Any]


class TraceWriter:
    """Tracer of the controller's timeline that also collects what the workers did."""

    def __init__(self, run_dir: Path, workers: Callable[[], Iterable[tuple[str, Worker]]]) -> None:
        """`workers`: the workers that run now, by name."""
        self._workers = workers
        self._file = LineFile(run_dir / FILE)

    def phase(self, name: str, begun: float, ended: float) -> None:
        self._write(CONTROLLER, "train task", name, begun, ended - begun)

    def group(self, kind: str, seq: int, stage: str, begun: float, ended: float) -> None:
        process = EVALUATION if kind == EVALUATION else GROUPS
        self._write(process, str(seq), stage, begun, ended - begun)

    def dropped(self, seq: int, reason: str, now: float) -> None:
        self._write(GROUPS, str(seq), DROPPED + reason, now, 0.0)

    def collect(self) -> None:
        """Write what the workers have reported."""
        for name, worker in self._workers():
            for activity, begun, seconds, thread in worker.take_events():
                self._write(name, THREADS[min(thread, 1)], activity, begun, seconds)
        self._file.flush()

    def step_done(self, step: int, now: float) -> None:
        self._file.write({"step": step, "at": round(now, 6)})
        self.collect()

    def close(self) -> None:
        self._file.close()

    def _write(self, process: str, thread: str, name: str, begun: float, seconds: float) -> None:
        # json.dumps takes several times as long, and a group alone has five rows.
        row = (
            f'{{"process": {_quoted(process)}, "thread": "{thread}", '
            f'"name": {_quoted(name)}, "at": {begun:.6f}, "s": {seconds:.6f}}}'
        )
        self._file.write_encoded(row.encode())


_quoted = lru_cache(maxsize=1024)(json.dumps)


def convert(run_dir: Path, steps: str = "") -> dict[str, Any]:
    """Return the trace of a run, or of steps "first:last", as Chrome's trace event format."""
    path = run_dir / FILE
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: the run was not traced. Train with trace=true to record it"
        )
    # The file is read twice, so that only the chosen steps are kept in memory.
    ends = {row["step"]: row["at"] for row in intact_rows(path) if "step" in row}
    start, end = _span(ends, steps)
    rows = [
        row
        for row in intact_rows(path)
        if "process" in row and row["at"] < end and row["at"] + row["s"] >= start
    ]
    zero = min((row["at"] for row in rows), default=0.0)
    tracks: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        tracks[row["process"], row["thread"]].append(row)
    return {"traceEvents": list(_events(tracks, zero)), "displayTimeUnit": "ms"}


def write_trace(run_dir: Path, target: Path, steps: str = "") -> int:
    """Write the trace for Perfetto; return the number of its events."""
    trace = convert(run_dir, steps)
    try:
        target.write_text(json.dumps(trace))
    except OSError as error:
        raise ConfigError(
            f"--output {target} cannot be written: {error.strerror}; expected a file in an "
            "existing directory"
        ) from None
    return len(trace["traceEvents"])


def _span(ends: dict[int, float], steps: str) -> tuple[float, float]:
    if not steps:
        return float("-inf"), float("inf")
    first, separator, last = steps.partition(":")
    if not first.isdigit() or (separator and not last.isdigit()):
        raise ConfigError(f"steps {steps!r}: expected first:last, for example 10:12, or one step")
    low, high = int(first), int(last or first)
    found = [step for step in ends if low <= step <= high]
    if not found:
        known = f"{min(ends)} to {max(ends)}" if ends else "none"
        raise ConfigError(f"steps {steps!r}: the trace has none of them; it has steps {known}")
    return ends.get(min(found) - 1, float("-inf")), ends[max(found)]


def _events(tracks: dict[tuple[str, str], list[Row]], zero: float) -> Iterator[Row]:
    lanes = _lanes(tracks)
    first = (CONTROLLER, GROUPS, EVALUATION)
    names = {process for process, _ in lanes}
    processes = [name for name in first if name in names] + sorted(names - set(first))
    for pid, process in enumerate(processes, 1):
        yield _name("process_name", pid, 0, process)
        threads = [thread for owner, thread in lanes if owner == process]
        for tid, thread in enumerate(threads, 1):
            yield _name("thread_name", pid, tid, thread)
            for row in _nested(lanes[process, thread]):
                begun = round((row["at"] - zero) * 1e6)
                ended = round((row["at"] + row["s"] - zero) * 1e6)
                instant = row["name"].startswith(DROPPED)
                kind = {"ph": "i", "s": "t"} if instant else {"ph": "X", "dur": ended - begun}
                place = {"cat": process, "pid": pid, "tid": tid, "ts": begun}
                yield {"name": row["name"], **place, **kind}


def _lanes(tracks: dict[tuple[str, str], list[Row]]) -> dict[tuple[str, str], list[Row]]:
    """Return the tracks, with the groups on as few tracks as they need without overlap."""
    found: dict[tuple[str, str], list[Row]] = {}
    free_at: dict[tuple[str, str], float] = {}

    def begin(track: tuple[str, str]) -> float:
        return min(row["at"] for row in tracks[track])

    for process, thread in sorted(tracks, key=begin):
        rows = tracks[process, thread]
        if process not in (GROUPS, EVALUATION):
            found[process, thread] = rows
            continue
        start = begin((process, thread))
        end = max(row["at"] + row["s"] for row in rows)
        free = [lane for lane, at in free_at.items() if lane[0] == process and at <= start]
        number = sum(lane[0] == process for lane in free_at) + 1
        lane = free[0] if free else (process, f"lane {number}")
        free_at[lane] = end
        whole = {"name": f"group {thread}", "at": start, "s": end - start}
        found.setdefault(lane, []).extend([whole, *rows])
    return found


def _nested(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows in order; one that begins in another and ends after it, begins at its end.

    The mapping of a worker's clock improves during a run, so times can differ by microseconds.
    """
    open_until: list[float] = []
    for row in sorted(rows, key=lambda row: (row["at"], -row["s"])):
        start, end = row["at"], row["at"] + row["s"]
        while open_until and open_until[-1] <= start:
            open_until.pop()
        if open_until and end > open_until[-1]:
            start = open_until.pop()
            while open_until and open_until[-1] < end:
                start = open_until.pop()
        open_until.append(end)
        yield row | {"at": start, "s": max(0.0, end - start)}


def _name(kind: str, pid: int, tid: int, name: str) -> Row:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
