"""TensorBoard: event files in `RUN_DIR/tensorboard`. Show them with `tensorboard --logdir runs`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from paceline.observe.trackers import COLUMNS, TrackedRun


class EventFiles:
    def __init__(self, run: TrackedRun) -> None:
        self.run_id = run.run_id
        self._writer = SummaryWriter(str(run.run_dir / "tensorboard"))
        if not run.resumed:
            self._text("settings", json.dumps(run.config, indent=1), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        lines = (
            f"{name}: {value}"
            for row in rows
            for name, value in [*zip(COLUMNS, row, strict=True), ("", "")]
        )
        self._text("samples", "\n".join(lines), step)

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        self._text("summary", json.dumps(summary, indent=1), int(summary["steps"]))

    def close(self, finished: bool) -> None:
        self._writer.close()

    def _text(self, name: str, text: str, step: int) -> None:
        """Write text so that Markdown shows it as it is: indented."""
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        self._writer.add_text(name, indented, step)
        self._writer.flush()


def open_run(run: TrackedRun) -> EventFiles:
    return EventFiles(run)
