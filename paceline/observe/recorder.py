"""What a run leaves behind for people and programs: metrics.jsonl (a line per step), samples.jsonl, summary.json (figures)."""

import json
import math
import os
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.loop import Metrics, Observer
from paceline.observe.samples import Samples
from paceline.rollout.engine import EngineStats
from paceline.types import Group

SUMMED = (
    "sample_age_s",
    "staleness/mean",
    "queue/utilization",
    "rollout/samples",
    "rollout/tokens",
    "train/busy_s",
)


class Recorder:
    """An observer of the loop; passes everything on to the display. Steps are written down and added up, not remembered: a run may have
    any number of them."""

    def __init__(
        self, folder: Path, length: int, answers: Samples, display: Observer | None = None
    ) -> None:
        self._engines: Sequence[EngineStats] = ()
        self._answers = answers
        self._display = display
        path = folder / "metrics.jsonl"
        with path.open("ab") as file:
            file.truncate(length)
        with path.open(encoding="utf-8") as lines:
            self._rewards = array(
                "d", (json.loads(line)["reward/mean"] for line in lines)
            )  # of all steps
        self._earlier = len(self._rewards)  # steps made before this run
        self._sums: Counter[str] = Counter()  # of SUMMED
        self._most: dict[str, float] = {}  # of staleness and memory
        self._looks, self._queue_use, self._seen = 0, 0.0, 0.0  # how often, the sum, the last
        self._file = path.open("a", encoding="utf-8")
        self._started = time.perf_counter()

    @property
    def length(self) -> int:
        """Bytes written so far; a checkpoint remembers it, so that continuing from it cuts off what came after."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def step_done(self, step: int, metrics: Metrics, groups: Sequence[Group]) -> None:
        self._file.write(
            json.dumps({"step": step} | {name: _short(value) for name, value in metrics.items()})
            + "\n"
        )
        self._file.flush()
        self._rewards.append(metrics["reward/mean"])
        self._sums.update({name: metrics.get(name, 0.0) for name in SUMMED})
        for name, value in metrics.items():
            if name == "staleness/max" or name.startswith("memory/"):
                self._most[name] = max(self._most.get(name, 0.0), value)
        self._answers.step_done(step, groups)
        if self._display:
            self._display.step_done(step, metrics, groups)

    def engines_polled(self, engines: Sequence[EngineStats], queue_utilization: float) -> None:
        self._looks, self._queue_use, self._seen = (
            self._looks + 1,
            self._queue_use + queue_utilization,
            queue_utilization,
        )
        self.record_final_stats(engines)

    def record_final_stats(self, engines: Sequence[EngineStats]) -> None:
        """What the engines have done in all; the queue is not looked at."""
        self._engines = engines
        if self._display:
            self._display.engines_polled(engines, self._seen)

    def close(self) -> None:
        self._file.close()
        self._answers.close()

    def summary(
        self, *, sync_s: Sequence[float], ledger: dict[str, Any], memory_peak_bytes: int
    ) -> dict[str, Any]:
        """The figures of this run (of this part of it, if it was continued; rewards are those of the whole)."""
        rewards, sums, wall = (
            self._rewards,
            self._sums,
            max(time.perf_counter() - self._started, 1e-9),
        )
        steps = len(rewards) - self._earlier
        last = max(1, len(rewards) // 10)
        return {
            "steps": len(rewards),
            "steps_this_run": steps,
            "wall_s": wall,
            "reward_first": rewards[0]
            if rewards
            else None,  # of the first step: the model as it came
            "reward_last": float(np.mean(rewards[-last:]))
            if rewards
            else None,  # of the last tenth of all steps
            "samples_per_s": sums["rollout/samples"] / wall,
            "tokens_per_s": sums["rollout/tokens"] / wall,
            "steps_per_s": steps / wall,
            "mean_sample_age_s": sums["sample_age_s"] / max(1, steps),
            "staleness_mean": sums["staleness/mean"] / max(1, steps),
            "staleness_max": int(self._most.get("staleness/max", 0)),
            "sync_latency_s": float(np.mean(sync_s)) if sync_s else 0.0,
            "queue_utilisation": self._queue_use / self._looks
            if self._looks
            else sums["queue/utilization"] / max(1, steps),
            "rollout_busy_fraction": min(
                1.0, sum(e.busy_s for e in self._engines) / max(1, len(self._engines)) / wall
            ),
            "train_busy_fraction": min(1.0, sums["train/busy_s"] / wall),
            "memory_peak_bytes": memory_peak_bytes,
            "memory_phases": self._memory_phases(),  # the most of each phase, where engine and trainer take turns
            "ledger": ledger,
        }

    def _memory_phases(self) -> dict[str, int]:
        peaks = {
            name: int(value) for name, value in self._most.items() if name.startswith("memory/")
        }
        return {
            name.removeprefix("memory/").removesuffix("_bytes"): value
            for name, value in peaks.items()
        }


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data, indent=1))
    temporary.replace(path)


def _short(value: float) -> float | None:
    """For a file that other programs read: JSON knows no nan."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.6g}") if abs(value) < 1e6 else value
