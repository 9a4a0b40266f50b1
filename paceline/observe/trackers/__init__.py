"""Experiment trackers: sinks that write a run to TensorBoard, Weights & Biases, MLflow or trackio.

A tracker opens its backend on the thread of its sink, because that may wait for a network. It keeps
`RUN_DIR/trackers/NAME.json`, so that a resumed run continues the same run of the tracker and logs
no step twice.
"""

import importlib
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.printable import redacted

PROJECT = "paceline"  # of trackers that sort runs by project, unless their own variable names one
SAMPLES_EVERY = 10  # steps
MAX_COMPLETIONS = 4  # of a group
MAX_CHARACTERS = 2000  # of a text
COLUMNS = ("step", "prompt", "completion", "reward", "tokens", "staleness")


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a backend has to know of a run. `run_id`: of the run in the tracker."""

    name: str
    run_dir: Path
    config: dict[str, Any]
    run_id: str
    resumed: bool


class Backend(Protocol):
    """The run in a tracker. Each module of this package has a function `open_run` that returns one.

    `run_id` is the one that was given, or another one that the tracker has chosen.
    """

    run_id: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Write a table with the columns COLUMNS."""
        ...

    def log_summary(self, summary: Mapping[str, Any]) -> None: ...

    def close(self, finished: bool) -> None:
        """End the run in the tracker. `finished`: the last step was made."""
        ...


@dataclass
class _State:
    """What a tracker has got so far, as its file says."""

    run_id: str
    step: int = 0
    evaluated: int = -1  # a run may be evaluated before its first step
    samples: int = 0


class Tracker:
    """A sink that writes to a backend. All methods but the constructor may wait for a network."""

    close_timeout_s = 15.0  # at the end of a run; uploads take longer than closing a file

    def __init__(
        self, name: str, run_dir: Path, config: Mapping[str, Any], new_run: bool = False
    ) -> None:
        """`new_run`: begin a run in the tracker, even if there is one, because the steps that it
        has are abandoned."""
        self._name, self._run_dir = name, run_dir
        self._config = json.loads(redacted(json.dumps(config)))
        self._file = run_dir / "trackers" / f"{name}.json"
        self._file.parent.mkdir(exist_ok=True)
        found = None if new_run else _read_state(self._file)
        self._resumed = found is not None
        self._state = found or _State(uuid.uuid4().hex[:12])
        self._backend: Backend | None = None
        self._finished = False

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step, or an evaluation, which also comes with the metrics of a later step."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        scores = {n: v for n, v in finite.items() if n.startswith("evaluation/")}
        others = {n: v for n, v in finite.items() if n not in scores}
        evaluated = int(scores.get("evaluation/step", -1))
        if evaluated > self._state.evaluated:
            self._log(evaluated, scores)
            self._state.evaluated = evaluated
        if others and step > self._state.step:
            self._log(step, others)
            self._state.step = step
        if self._backend:
            self._save()

    def log_samples(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Log completions of some steps; `groups` are lines of samples.jsonl."""
        if step <= self._state.samples or (step > 1 and step % SAMPLES_EVERY) or not groups:
            return
        rows = [row for group in groups for row in _sample_rows(group)]
        self._opened().log_samples(step, rows)
        self._state.samples = step
        self._save()

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        self._opened().log_summary(flat(summary))
        self._finished = True

    def close(self) -> None:
        if self._backend:
            self._backend.close(self._finished)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._opened().log(step, metrics)

    def _opened(self) -> Backend:
        """Return the backend; open it on first use."""
        if self._backend is None:
            name, state = self._run_dir.absolute().name, self._state
            run = TrackedRun(name, self._run_dir, self._config, state.run_id, self._resumed)
            module = importlib.import_module(f"{__name__}.{self._name}")  # takes seconds
            self._backend = module.open_run(run)
            state.run_id = self._backend.run_id
            self._save()
        return self._backend

    def _save(self) -> None:
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self._state)))
        temporary.replace(self._file)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _read_state(file: Path) -> _State | None:
    try:
        return _State(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _sample_rows(group: Mapping[str, Any]) -> list[list[Any]]:
    return [
        [
            group["step"],
            group["prompt"][:MAX_CHARACTERS],
            completion["text"][:MAX_CHARACTERS],
            completion["reward"],
            completion["tokens"],
            group["staleness"],
        ]
        for completion in group["completions"][:MAX_COMPLETIONS]
    ]
