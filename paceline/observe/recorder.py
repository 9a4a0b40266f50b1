"""What a run leaves behind for people and programs: metrics.jsonl (a line per step), answers.jsonl, summary.json (figures)."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.loop import Metrics, Observer
from paceline.observe.answers import Answers
from paceline.rollout.engine import EngineStats
from paceline.types import Group


class Recorder:
    """An observer of the loop; passes everything on to the display."""

    def __init__(self, folder: Path, length: int, answers: Answers, display: Observer | None = None) -> None:
        self.rows: list[Metrics] = []
        self.engines: Sequence[EngineStats] = ()
        self._answers = answers
        self._display = display
        path = folder / "metrics.jsonl"
        with path.open("ab") as file:
            file.truncate(length)
        self.earlier = [json.loads(line) for line in path.read_text().splitlines()]
        self._file = path.open("a", encoding="utf-8")
        self._started = time.perf_counter()
        self._queue_use: list[float] = []

    @property
    def length(self) -> int:
        """Bytes written so far; a checkpoint remembers it, so that continuing from it cuts off what came after."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def step_done(self, step: int, metrics: Metrics, groups: Sequence[Group]) -> None:
        row: Metrics = {"step": step} | {name: _short(value) for name, value in metrics.items()}
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._answers.step_done(step, groups)
        if self._display:
            self._display.step_done(step, metrics, groups)

    def looked(self, engines: Sequence[EngineStats], queue_utilisation: float) -> None:
        self.engines = engines
        self._queue_use.append(queue_utilisation)
        if self._display:
            self._display.looked(engines, queue_utilisation)

    def close(self) -> None:
        self._file.close()
        self._answers.close()

    def summary(self, *, sync_s: Sequence[float], ledger: dict[str, Any], memory_peak_bytes: int) -> dict[str, Any]:
        """The figures of this run (of this part of it, if it was continued; rewards are those of the whole)."""
        rows, wall = self.rows, max(time.perf_counter() - self._started, 1e-9)
        rewards = [row["reward/mean"] for row in [*self.earlier, *rows]]
        last = max(1, len(rewards) // 10)

        def mean(name: str) -> float:
            return float(np.mean([row[name] for row in rows])) if rows else 0.0

        def total(name: str) -> float:
            return sum(row.get(name, 0.0) for row in rows)

        return {
            "steps": len(rewards),
            "steps_this_run": len(rows),
            "wall_s": wall,
            "reward_first": rewards[0] if rewards else None,  # of the first step: the model as it came
            "reward_last": float(np.mean(rewards[-last:])) if rewards else None,  # of the last tenth of all steps
            "samples_per_s": total("rollout/samples") / wall,
            "tokens_per_s": total("rollout/tokens") / wall,
            "steps_per_s": len(rows) / wall,
            "mean_sample_age_s": mean("sample_age_s"),
            "staleness_mean": mean("staleness/mean"),
            "staleness_max": int(max((row["staleness/max"] for row in rows), default=0)),
            "sync_latency_s": float(np.mean(sync_s)) if sync_s else 0.0,
            "queue_utilisation": float(np.mean(self._queue_use or [row["queue/utilisation"] for row in rows] or [0.0])),
            "rollout_busy_share": min(1.0, sum(e.busy_s for e in self.engines) / max(1, len(self.engines)) / wall),
            "train_busy_share": min(1.0, total("train/busy_s") / wall),
            "memory_peak_bytes": memory_peak_bytes,
            "memory_phases": self._memory_phases(),  # the most of each phase, where engine and trainer take turns
            "ledger": ledger,
        }

    def _memory_phases(self) -> dict[str, int]:
        peaks: dict[str, int] = {}
        for name, value in ((name, value) for row in self.rows for name, value in row.items() if name.startswith("memory/")):
            phase = name.removeprefix("memory/").removesuffix("_bytes")
            peaks[phase] = max(peaks.get(phase, 0), int(value))
        return peaks


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data, indent=1))
    temporary.replace(path)


def _short(value: float) -> float:
    return float(f"{value:.6g}") if abs(value) < 1e6 else value
