"""What a person sees while a run goes on: one live panel on a terminal, plain lines elsewhere; a table at the end."""

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.console import Group as Stack
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from paceline.loop import Metrics
from paceline.rollout.engine import EngineStats
from paceline.types import Group

SPARKS = "▁▂▃▄▅▆▇█"
STATUS_INTERVAL_S = 30.0  # the longest silence where there is no live panel
TRUNCATION_WARNING_FRACTION = 0.5  # answers cut off
RATE_WINDOW_S = 5.0  # rates are of at least that long


class Display:
    def __init__(
        self, console: Console, title: str, steps: int, first_step: int, max_staleness: int
    ) -> None:
        self._console = console
        self._title = escape(title)
        self._steps, self._first_step = steps, first_step
        self._max_staleness = max_staleness
        self._rewards: deque[float] = deque(maxlen=48)
        self._metrics: Metrics = {}
        self._sample = ""
        self._queue_use = 0.0
        self._made = 0  # tokens, by the engines
        self._done = {
            "rollout": 0.0,
            "train": 0.0,
            "tokens": 0.0,
        }  # seconds busy, tokens trained on: so far
        self._begun = self._said = time.perf_counter()
        self._mark = (self._begun, dict(self._done))
        self._rates: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(bar_width=max(4, min(40, console.width - 42))),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = self._progress.add_task("steps", total=steps, completed=first_step)
        self._live = (
            Live(get_renderable=self._panel, console=console, refresh_per_second=4, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        else:
            self._say(
                f"{self._title}: the first groups are being generated; {self._steps - self._first_step} steps to make"
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def step_done(self, step: int, metrics: Metrics, groups: Sequence[Group]) -> None:
        self._metrics = metrics
        self._rewards.append(metrics["reward/mean"])
        self._progress.update(self._bar, completed=step)
        self._done["train"] += metrics.get("train/busy_s", metrics["time/train_s"])
        self._done["tokens"] += metrics["rollout/tokens"]
        self._measure()
        prompt, answer = groups[0].prompt, groups[0].trajectories[0]
        asked = prompt.row.get("prompt", prompt.text)
        self._sample = f"{asked!r} → {answer.text.strip()!r}  reward {answer.total_reward:g}"
        made, now = step - self._first_step, time.perf_counter()
        if not self._live and (
            made <= 3
            or step % 10 == 0
            or step == self._steps
            or now - self._said > STATUS_INTERVAL_S
        ):
            left = round((now - self._begun) / made * (self._steps - step))
            self._say(
                f"step {step:4d}  reward {metrics['reward/mean']:.3f}  staleness {metrics['staleness/mean']:.1f}"
                f" (max {metrics['staleness/max']:.0f})  queue {self._queue_use:.0%}  rollout busy {self._busy('rollout')}"
                f"  train busy {self._busy('train')}  {self._rates['tokens']:,.0f} tokens/s"
                f"  left {timedelta(seconds=left)}{self._cut_off('  ')}"
            )

    def engines_polled(self, engines: Sequence[EngineStats], queue_utilization: float) -> None:
        self._queue_use = queue_utilization
        self._made = sum(e.tokens for e in engines)
        self._done["rollout"] = sum(e.busy_s for e in engines) / max(1, len(engines))
        if not self._live and time.perf_counter() - self._said > STATUS_INTERVAL_S:
            self._say(
                f"still at it: {self._made:,} tokens generated so far, queue {queue_utilization:.0%}"
            )

    def _say(self, line: str) -> None:
        self._said = time.perf_counter()
        self._console.print(line, highlight=False, soft_wrap=True)

    def _measure(self) -> None:
        """Rates over some whole steps, so that those who take turns are not always found at rest, or always at work."""
        (then, before), now = self._mark, time.perf_counter()
        if then == self._begun or now - then >= RATE_WINDOW_S:
            # a new engine counts from 0
            self._rates = {
                name: max(0.0, value - before[name]) / max(1e-9, now - then)
                for name, value in self._done.items()
            }
        if now - then >= RATE_WINDOW_S:
            self._mark = (now, dict(self._done))

    def _cut_off(self, before: str) -> str:
        """Where most answers never end, a reward judges half sentences: worth telling."""
        share = self._metrics.get("rollout/truncated_fraction", 0.0)
        return (
            f"{before}{share:.0%} of answers cut off at rollout.max_response_length"
            if share > TRUNCATION_WARNING_FRACTION
            else ""
        )

    def _busy(self, who: str) -> str:
        return f"{min(1.0, self._rates[who]):.0%}"

    def _panel(self) -> Panel:
        m = self._metrics
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", justify="right")
        grid.add_column()
        if not m:
            grid.add_row("", f"the first groups are being generated … {self._made:,} tokens so far")
            return self._framed(Stack(self._progress, grid))
        grid.add_row(
            "reward", f"[bold]{m['reward/mean']:.3f}[/]  [green]{_sparkline(self._rewards)}[/]"
        )
        grid.add_row(
            "staleness",
            f"mean {m['staleness/mean']:.2f}   max {m['staleness/max']:.0f} of {self._max_staleness} allowed",
        )
        grid.add_row("queue", f"{_gauge(self._queue_use)} {self._queue_use:.0%} full")
        grid.add_row(
            "rollout",
            f"{_gauge(self._rates['rollout'])} {self._busy('rollout')} busy   {self._rates['tokens']:,.0f} tokens/s trained",
        )
        grid.add_row(
            "train",
            f"{_gauge(self._rates['train'])} {self._busy('train')} busy   lr {m.get('train/lr', 0):.1e}",
        )
        if truncated := self._cut_off(""):
            grid.add_row("", f"[yellow]{truncated}[/]")
        sample = Text(
            "".join(c if c.isprintable() else "·" for c in self._sample),
            no_wrap=True,
            overflow="ellipsis",
        )
        return self._framed(
            Stack(self._progress, grid, sample)
        )  # model-written text controls neither terminal nor markup

    def _framed(self, content: Stack) -> Panel:
        return Panel(
            content, title=self._title, width=min(88, self._console.width), border_style="cyan"
        )


def closing_table(console: Console, summary: dict[str, Any], folder: str) -> None:
    table = Table(
        title="The run in figures",
        show_header=False,
        title_justify="left",
        min_width=min(60, console.width),
    )
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    ledger = summary["ledger"]
    dropped = sum(ledger["dropped"].values())
    rows = [
        (
            "reward, first → last",
            f"{summary['reward_first']:.3f} → [bold green]{summary['reward_last']:.3f}[/]",
        ),
        ("steps", f"{summary['steps']}  ({summary['steps_per_s']:.2f} a second)"),
        (
            "samples, tokens per second",
            f"{summary['samples_per_s']:,.0f}, {summary['tokens_per_s']:,.0f}",
        ),
        ("staleness, mean and max", f"{summary['staleness_mean']:.2f}, {summary['staleness_max']}"),
        ("sample age", f"{summary['mean_sample_age_s']:.2f} s"),
        ("weight hand-over", f"{summary['sync_latency_s'] * 1000:.1f} ms"),
        (
            "busy: rollout, train",
            f"{summary['rollout_busy_fraction']:.0%}, {summary['train_busy_fraction']:.0%}",
        ),
        ("peak memory", f"{summary['memory_peak_bytes'] / 2**30:.2f} GiB"),
        (
            "ledger",
            f"{ledger['issued']} issued = {ledger['trained']} trained + {dropped} dropped + {ledger['outstanding']} unfinished",
        ),
        ("run folder", folder),
        ("what it answered", f"paceline samples {folder}"),
    ]
    if replaced := summary.get("fleet", {}).get("replaced"):
        rows.insert(-2, ("rollout workers replaced", str(replaced)))
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def workers_table(rows: Sequence[dict[str, Any]]) -> Table:
    """What `paceline workers list` shows."""
    table = Table(title="Rollout workers", title_justify="left")
    for heading in ("name", "node", "state", "version", "attempts", "tokens/s", "incarnation"):
        table.add_column(
            heading, justify="left" if heading in ("name", "node", "state") else "right"
        )
    for row in rows:
        colour = {"live": "green", "dead": "red"}.get(row["state"], "yellow")
        figures = (row["version"], row["load"], f"{row['tokens_per_s']:,.0f}", row["incarnation"])
        table.add_row(row["name"], row["node"], f"[{colour}]{row['state']}[/]", *map(str, figures))
    return table


def _sparkline(values: Sequence[float]) -> str:
    low, high = min(values), max(max(values), min(values) + 1e-9)
    return "".join(
        SPARKS[round((value - low) / (high - low) * (len(SPARKS) - 1))] for value in values
    )


def _gauge(share: float, width: int = 20) -> str:
    full = round(max(0.0, min(1.0, share)) * width)
    return f"[cyan]{'━' * full}[/][dim]{'━' * (width - full)}[/]"
