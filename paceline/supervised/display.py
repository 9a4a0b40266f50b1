"""What the terminal shows during `paceline sft`: a progress bar with the loss, or plain lines where
output is not a terminal; at the end a table with the run summary."""

import time
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from paceline.loop import Metrics
from paceline.observe.display import STATUS_INTERVAL_S
from paceline.observe.model_card import data_name
from paceline.observe.terminal import StartTerminal
from paceline.supervised.config import SftConfig


class LossDisplay:
    """The observer that shows a supervised run to the user."""

    def __init__(self, console: Console, title: str, steps: int, first_step: int) -> None:
        self._console, self._title = console, title
        self._steps, self._first_step = steps, first_step
        self._tokens = 0.0
        self._started = self._last_line = time.perf_counter()
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(bar_width=max(4, min(30, console.width - 80))),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TextColumn("remaining"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("", total=steps, completed=first_step)

    def __enter__(self) -> "LossDisplay":
        self._print(f"{self._title}: {self._steps - self._first_step} steps to train")
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step_done(self, step: int, metrics: Metrics) -> None:
        done, now = step - self._first_step, time.perf_counter()
        self._tokens += metrics["data/tokens"]
        text = (
            f"loss {metrics['train/loss']:.4f}  lr {metrics['train/lr']:.1e}  "
            f"{self._tokens / (now - self._started):,.0f} tokens/s"
        )
        self._progress.update(self._bar, completed=step, description=text)
        if "validation/loss" in metrics:
            self._print(f"step {step:4d}  validation loss {metrics['validation/loss']:.4f}")
        milestone = done <= 3 or step % 10 == 0 or step == self._steps
        if not self._console.is_terminal and (
            milestone or now - self._last_line > STATUS_INTERVAL_S
        ):
            remaining = round((now - self._started) / done * (self._steps - step))
            self._print(f"step {step:4d}  {text}  remaining {timedelta(seconds=remaining)}")

    def _print(self, line: str) -> None:
        self._last_line = time.perf_counter()
        self._console.print(line, highlight=False, soft_wrap=True)


class SftTerminal(StartTerminal):
    """What `paceline sft` and `paceline.sft` show."""

    def __init__(self, config: SftConfig, console: Console | None = None) -> None:
        super().__init__(console)
        self._config, self._steps = config, 0

    def display(self, first_step: int, steps: int) -> LossDisplay:
        self._steps = steps
        title = f"{self._config.run_dir}: sft, {data_name(self._config.data)}"
        return self._show(LossDisplay(self._console, title, steps, first_step))

    def finish(self, summary: dict[str, Any], checkpoint: str) -> None:
        self._finish(self._config.run_dir, summary["steps"], self._steps or summary["steps"])
        print_summary(self._console, summary, self._config.run_dir, checkpoint)


def print_summary(console: Console, summary: dict[str, Any], run_dir: str, checkpoint: str) -> None:
    """Print the table at the end of a run."""
    table = Table(title="Run summary", show_header=False, title_justify="left")
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    rows: dict[str, str | Text] = {}
    first, last = summary["loss_first"], summary["loss_last"]
    if first is not None:  # a run that is stopped before its first step has no loss
        rows["loss, first → last"] = Text.assemble(f"{first:.4f} → ", (f"{last:.4f}", "bold green"))
    if "validation_loss" in summary:
        first, last = summary["validation_loss_first"], summary["validation_loss"]
        before = "" if first is None else f"{first:.4f} → "  # None: validation began later
        perplexity = summary["validation_perplexity"]
        rows["validation loss"] = f"{before}{last:.4f}  (perplexity {perplexity:.3f})"
    rows |= {
        "steps": f"{summary['steps']}  ({summary['steps_per_s']:.2f} per second)",
        "tokens per second": f"{summary['tokens_per_s']:,.0f}, of which "
        f"{summary['trained_tokens_per_s']:,.0f} trained",
        "busy": f"{summary['train_busy_fraction']:.0%}",
        "peak memory": f"{summary['memory_peak_bytes'] / 2**30:.2f} GiB",
        "run directory": run_dir,
        "model": checkpoint,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
