"""The results of a supervised run: metrics.jsonl (one line per step) and the contents of
summary.json."""

import json
import os
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.loop import Metrics
from paceline.observe.recorder import rounded
from paceline.observe.sinks import Sinks

SUMMED = ("train/tokens", "data/tokens", "data/rows", "train/busy_s")


class LossObserver(Protocol):
    """Gets the metrics of each step of a supervised run."""

    def step_done(self, step: int, metrics: Metrics) -> None: ...


class LossRecorder:
    """Writes the metrics of each step and passes them on. Steps are summed, not kept."""

    def __init__(
        self, run_dir: Path, length: int, display: LossObserver | None, sinks: Sinks
    ) -> None:
        """`length`: bytes of metrics.jsonl that a checkpoint has recorded; the rest is dropped."""
        self._display, self._sinks = display, sinks
        self.validation_first: float | None = None
        self._validation: float | None = None
        self._losses = array("d")
        self._sums: Counter[str] = Counter()
        path = run_dir / "metrics.jsonl"
        with path.open("ab") as file:
            file.truncate(length)
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                self._keep(json.loads(line))
        self._earlier_steps = len(self._losses)
        self._file = path.open("a", encoding="utf-8")
        self._started = time.perf_counter()

    @property
    def length(self) -> int:
        """Bytes written so far. A checkpoint stores it, so that resuming truncates later lines."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    @property
    def loss(self) -> float | None:
        """Loss of the last step, on held-out rows if it was measured."""
        last = self._losses[-1] if self._losses else None
        return last if self._validation is None else self._validation

    def step_done(self, step: int, metrics: Metrics) -> None:
        values = {name: rounded(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step} | values) + "\n")
        self._file.flush()
        self._keep(metrics)
        self._sums.update({name: metrics.get(name, 0.0) for name in SUMMED})
        self._sinks.put(step, metrics)
        if self._display:
            self._display.step_done(step, metrics)

    def close(self) -> None:
        self._file.close()
        self._sinks.close()

    def summary(self, memory_peak_bytes: int) -> dict[str, Any]:
        """Return the results. If the run was resumed, rates cover only the steps since then."""
        losses, sums = self._losses, self._sums
        wall = max(time.perf_counter() - self._started, 1e-9)
        steps = len(losses) - self._earlier_steps
        found = {
            "steps": len(losses),
            "steps_this_run": steps,
            "wall_s": wall,
            # Of the first step, before any update, and of the last tenth of all steps.
            "loss_first": losses[0] if losses else None,
            "loss_last": float(np.mean(losses[-max(1, len(losses) // 10) :])) if losses else None,
            "rows_per_s": sums["data/rows"] / wall,
            "tokens_per_s": sums["data/tokens"] / wall,
            "trained_tokens_per_s": sums["train/tokens"] / wall,
            "steps_per_s": steps / wall,
            "train_busy_fraction": min(1.0, sums["train/busy_s"] / wall),
            "memory_peak_bytes": memory_peak_bytes,
        }
        if self._validation is not None:
            found |= {
                "validation_loss_first": self.validation_first,
                "validation_loss": self._validation,
                "validation_perplexity": float(np.exp(self._validation)),
            }
        return found

    def _keep(self, metrics: Metrics) -> None:
        loss = metrics["train/loss"]
        self._losses.append(float("nan") if loss is None else loss)  # JSON has no nan
        self._validation = metrics.get("validation/loss", self._validation)
