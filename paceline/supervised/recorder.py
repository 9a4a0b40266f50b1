"""The results of a supervised run: metrics.jsonl (one line per step) and the contents of
summary.json."""

import math
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.line_file import LineFile, intact_rows
from paceline.loop import Metrics
from paceline.observe.recorder import rounded
from paceline.observe.sinks import Sinks

SUMMED = ("train/tokens", "data/tokens", "data/rows", "train/busy_s")


# What every summary has, because it is shown at the end of a run.
SUMMARY = (
    *("steps", "steps_per_s", "tokens_per_s", "trained_tokens_per_s", "loss_first", "loss_last"),
    *("train_busy_fraction", "memory_peak_bytes"),
)


class LossObserver(Protocol):
    """Gets the metrics of each step of a supervised run."""

    def step_done(self, step: int, metrics: Metrics) -> None: ...


class LossRecorder:
    """Writes the metrics of each step and passes them on. Steps are summed, not kept."""

    def __init__(
        self,
        run_dir: Path,
        length: int,
        display: LossObserver | None,
        sinks: Sinks,
        first_step: int = 0,
    ) -> None:
        """`length`: bytes of metrics.jsonl that a checkpoint of `first_step` has recorded; the rest
        is dropped."""
        self._display, self._sinks = display, sinks
        self.validation_first: float | None = None
        self._validation: float | None = None
        self._losses = array("d")
        self._sums: Counter[str] = Counter()
        self._file = LineFile(run_dir / "metrics.jsonl", length, locked=True)
        for row in intact_rows(self._file.path):
            self._keep(row)
        self._first_step = self._step = first_step
        self._started = time.perf_counter()

    @property
    def length(self) -> int:
        """Bytes written so far. A checkpoint stores it, so that resuming truncates later lines."""
        return self._file.durable_length()

    @property
    def loss(self) -> float | None:
        """Loss of the last step, on held-out rows if it was measured."""
        last = self._losses[-1] if self._losses else None
        return last if self._validation is None else self._validation

    def step_done(self, step: int, metrics: Metrics) -> None:
        values = {name: rounded(value) for name, value in metrics.items()}
        self._file.write({"step": step} | values)
        self._file.flush()
        self._step = step
        self._keep(metrics)
        self._sums.update({name: metrics.get(name, 0.0) for name in SUMMED})
        self._sinks.put(step, metrics)
        if self._display:
            self._display.step_done(step, metrics)

    def log_summary(self, summary: dict[str, Any]) -> None:
        """Pass the results of a run that has ended on to the sinks."""
        self._sinks.log_summary(summary)

    def close(self) -> None:
        """Close both, also if a full disk lets the file fail."""
        try:
            self._file.close()
        finally:
            self._sinks.close()

    def summary(self, memory_peak_bytes: int) -> dict[str, Any]:
        """Return the results. If the run was resumed, rates cover only the steps since then."""
        losses, sums = self._losses, self._sums
        wall = max(time.perf_counter() - self._started, 1e-9)
        steps = self._step - self._first_step
        found = {
            "steps": self._step,
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

    def _keep(self, metrics: Mapping[str, Any]) -> None:
        loss = metrics.get("train/loss")
        self._losses.append(loss if isinstance(loss, float | int) else math.nan)  # null: JSON
        validation = metrics.get("validation/loss")
        self._validation = validation if isinstance(validation, float | int) else self._validation
