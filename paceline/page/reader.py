"""What the page shows of a run directory, read piece by piece while the run writes it.

Metrics are kept as columns. Of the samples only an index is kept; their text is read on request.
"""

import json
import threading
import time
from pathlib import Path
from typing import Any

from paceline.control import SOCKET, send_command
from paceline.errors import CheckpointError, ConfigError
from paceline.line_file import LineTail, read_lines
from paceline.printable import redacted

READ_S = 0.4  # for new samples, per update: the rest follows in the next one
REPLY_S = 2.0  # for a running job to list its workers
SNIPPET = 40  # characters of a prompt or completion in the index
MAX_FOUND = 5000  # groups of a search
LOG_BYTES = 200_000  # at the end of a log
MAX_WARNINGS = 100  # in them
Row = dict[str, Any]


class RunReader:
    """One run directory. Every method may be called by any thread."""

    def __init__(self, run_dir: Path) -> None:
        if not run_dir.is_dir():
            raise CheckpointError(
                f"{run_dir} is not a directory; expected a run directory, for example "
                "runs/fully_async"
            )
        self.run_dir = run_dir
        self._lock = threading.Lock()
        self._tails = {
            name: LineTail(run_dir / f"{name}.jsonl")
            for name in ("metrics", "distributions", "evaluations", "samples")
        }
        self._epoch = 0  # changes when a file was truncated: clients start over
        self._clear()

    def _clear(self) -> None:
        self._columns: dict[str, list[float | None]] = {"step": []}
        self._distributions: list[Row] = []
        self._evaluations: list[Row] = []
        self._index: list[list[Any]] = []
        self._starts: list[int] = []  # of the lines of samples

    def update(self, *, samples: bool = True) -> bool:
        """Read what was added to the files; return whether samples remain to be read."""
        with self._lock:
            if any([tail.changed() for tail in self._tails.values()]):
                self._epoch += 1
                self._tails = {name: LineTail(tail.path) for name, tail in self._tails.items()}
                self._clear()
            for _, row in self._tails["metrics"].read():
                self._add_metrics(row)
            self._distributions += [row for _, row in self._tails["distributions"].read()]
            self._evaluations += [row for _, row in self._tails["evaluations"].read()]
            more = samples and self._read_samples()
            for tail in self._tails.values():
                tail.mark()
            return more

    def _read_samples(self) -> bool:
        deadline = time.monotonic() + READ_S
        for start, row in self._tails["samples"].read():
            if entry := index_entry(row):
                self._starts.append(start)
                self._index.append(entry)
            if time.monotonic() > deadline:
                return True
        return False

    def _add_metrics(self, row: Row) -> None:
        count = len(self._columns["step"])
        for name, value in row.items():
            column = self._columns.setdefault(name, [None] * count)
            column.append(short(value) if isinstance(value, float | int) else None)
        for column in self._columns.values():
            column.extend([None] * (count + 1 - len(column)))

    def since(self, epoch: int, seen: dict[str, int]) -> Row:
        """Return what was added after the `seen` numbers of rows, or all if the epoch differs."""
        with self._lock:
            if epoch != self._epoch:
                seen = {}
            first = seen.get("metrics", 0)
            return {
                "epoch": self._epoch,
                "metrics": {name: column[first:] for name, column in self._columns.items()},
                "distributions": self._distributions[seen.get("distributions", 0) :],
                "evaluations": self._evaluations[seen.get("evaluations", 0) :],
                "samples": self._index[seen.get("samples", 0) :],
            }

    def description(self) -> Row:
        """Return what is small: name, state, settings, summary, workers and warnings."""
        workers, running = self._workers()
        summary = {} if running else self._summary()
        state = "running" if running else "finished" if summary else "stopped"
        return {
            "name": self.run_dir.resolve().name,
            "path": str(self.run_dir),
            "state": state,
            "config": flat(read_json(self.run_dir / "settings.json")),
            "summary": flat(summary),
            "workers": workers,
            "warnings": warnings(self.run_dir / "logs" / "main.log"),
        }

    def _summary(self) -> Row:
        """Return the summary, unless it is that of an earlier part of the run."""
        summary = read_json(self.run_dir / "summary.json")
        with self._lock:
            last = self._columns["step"][-1:]
        return summary if not last or last == [summary.get("steps")] else {}

    def group(self, number: int) -> Row | None:
        """Return the saved group of an entry of the index."""
        with self._lock:
            if not 0 <= number < len(self._starts):
                return None
            start = self._starts[number]
        return next((line.row for line in read_lines(self._samples, start=start)), None)

    def search(self, text: str) -> list[int]:
        """Return the entries of the index whose prompt, completions or turns contain the text."""
        with self._lock:
            numbers = {start: number for number, start in enumerate(self._starts)}
        wanted, found, start = text.casefold(), [], 0
        for line in read_lines(self._samples):
            if line.row and start in numbers and any(wanted in t for t in texts(line.row)):
                found.append(numbers[start])
                if len(found) == MAX_FOUND:
                    break
            start = line.end
        return found

    @property
    def _samples(self) -> Path:
        return self._tails["samples"].path

    def _workers(self) -> tuple[list[Row], bool]:
        """Return the rollout workers of a running job, and whether it runs."""
        if not (self.run_dir / SOCKET).exists():
            return [], False
        try:
            return send_command(self.run_dir, "list", reply_timeout_s=REPLY_S), True
        except ConfigError as error:  # no job, or it is starting, ending or suspended
            return [], "no job is running" not in str(error)


def index_entry(row: Row) -> list[Any] | None:
    """Return step, ID, staleness, end of the prompt and completions of a group; None if the line is
    not a group.

    A completion has its reward, its tokens, 1 if it was truncated, and the beginning of its text.
    """
    try:
        completions = [
            [
                short(sample["reward"]),
                int(sample["tokens"]),
                int(sample["finish"] == "length"),
                _one_line(str(sample["text"])[: 4 * SNIPPET])[:SNIPPET],
            ]
            for sample in row["completions"]
        ]
        prompt = _one_line(str(row["prompt"])[-4 * SNIPPET :])[-SNIPPET:]
        return [int(row["step"]), str(row["uid"]), int(row["staleness"]), prompt, completions]
    except (KeyError, TypeError, ValueError, OverflowError):  # the last one of int(infinity)
        return None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def texts(row: Row) -> list[str]:
    """Return the texts of a group that a search looks at, without distinction of case."""
    found = [row.get("prompt"), row.get("uid")]
    for sample in row.get("completions", ()):
        found.append(sample.get("text"))
        for turn in sample.get("turns", ()):
            found += [turn.get("prompt"), turn.get("text")]
    return [text.casefold() for text in found if isinstance(text, str)]


def short(value: float) -> float:
    """Return a number with five significant digits; integers and times stay as they are."""
    return value if isinstance(value, int) or abs(value) >= 1e5 else float(f"{value:.5g}")


def read_json(path: Path) -> Row:
    """Return the object in a file; nothing if there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def flat(tree: Row, prefix: str = "") -> dict[str, str]:
    """Return the leaves of nested settings as text, by their full names, without secrets."""
    found: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            found[prefix + name] = redacted(text)
    return found


def warnings(path: Path) -> list[str]:
    """Return the warnings and errors at the end of a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if " WARNING " in line or " ERROR " in line][-MAX_WARNINGS:]
