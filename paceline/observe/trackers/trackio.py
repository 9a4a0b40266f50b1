"""trackio: a local database, shown by `trackio show`, or the Space of TRACKIO_SPACE_ID. The project
is that of TRACKIO_PROJECT."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import trackio

from paceline.observe.trackers import COLUMNS, PROJECT, TrackedRun


class TrackioRun:
    def __init__(self, run: Any, run_id: str) -> None:
        self.run_id = run_id
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        table = trackio.Table(data=[dict(zip(COLUMNS, row, strict=True)) for row in rows])
        self._run.log({"samples": table}, step=step)

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        numbers = {
            f"summary/{name}": float(value)
            for name, value in summary.items()
            if isinstance(value, int | float)
        }
        self._run.log(numbers, step=int(summary["steps"]))

    def close(self, finished: bool) -> None:
        self._run.finish()


def open_run(run: TrackedRun) -> TrackioRun:
    opened = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=f"{run.name}-{run.run_id}",  # trackio finds a run by its name
        config=run.config,
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return TrackioRun(opened, run.run_id)
