"""What the terminal shows during `paceline train`: a live panel, or plain lines where output is
not a terminal; at the end a table with the run summary."""

import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from shlex import quote
from typing import Any

from rich.console import Console
from rich.console import Group as Stack
from rich.live import Live
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
from paceline.observe.device_time import describe, describe_metrics
from paceline.observe.rollout_busy import RolloutBusy
from paceline.printable import printable
from paceline.rollout.engine import EngineStats
from paceline.types import Group

SPARKS = "▁▂▃▄▅▆▇█"
STATUS_INTERVAL_S = 30.0  # maximum time without a line, where there is no live panel
TRUNCATION_WARNING_FRACTION = 0.5  # of the completions of a step
RATE_WINDOW_S = 5.0  # rates are means over the shortest number of steps that take this long


class Display:
    """The observer that shows a run to the user."""

    def __init__(
        self, console: Console, title: str, steps: int, first_step: int, max_staleness: int
    ) -> None:
        self._console = console
        self._title = title
        self._steps, self._first_step = steps, first_step
        self._max_staleness = max_staleness
        self._rewards: deque[float] = deque(maxlen=48)
        self._metrics: Metrics = {}
        self._evaluations: list[tuple[int, float]] = []  # step and mean reward
        self._sample = ""
        self._queue_utilization = 0.0
        self._generated = 0  # tokens, by all engines
        # Busy seconds of train, and tokens trained on, since the start.
        self._totals = {"train": 0.0, "tokens": 0.0}
        self._started = self._last_line = time.perf_counter()
        self._rollout_busy = RolloutBusy(self._started, synchronous=max_staleness == 0)
        self._window = deque([(self._started, dict(self._totals))])  # totals at the ends of steps
        self._rates: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(bar_width=max(4, min(40, console.width - 47))),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("remaining"),
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
            remaining = self._steps - self._first_step
            self._print(f"{self._title}: generating the first groups; {remaining} steps to train")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def step_done(self, step: int, metrics: Metrics, groups: Sequence[Group]) -> None:
        self._metrics = metrics
        self._rewards.append(metrics["reward/mean"])
        self._progress.update(self._bar, completed=step)
        self._totals["train"] += metrics.get("train/busy_s", metrics["time/train_s"])
        self._totals["tokens"] += metrics["rollout/tokens"]
        generating_s = metrics.get("time/wait_s", 0.0) + metrics.get("time/evaluate_s", 0.0)
        self._update_rates(generating_s)
        prompt, completion = groups[0].prompt, groups[0].trajectories[0]
        text = prompt.row.get("prompt", prompt.text)
        self._sample = f"{text!r} → {completion.text.strip()!r}  reward {completion.total_reward:g}"
        steps_done, now = step - self._first_step, time.perf_counter()
        if not self._live and (
            steps_done <= 3
            or step % 10 == 0
            or step == self._steps
            or now - self._last_line > STATUS_INTERVAL_S
        ):
            remaining = round((now - self._started) / steps_done * (self._steps - step))
            self._print(
                f"step {step:4d}  reward {metrics['reward/mean']:.3f}{self._teacher_kl('  KL ')}"
                f"  staleness {metrics['staleness/mean']:.1f} (max {metrics['staleness/max']:.0f})"
                f"  queue {self._queue_utilization:.0%}{self._busy('rollout', '  rollout busy {}')}"
                f"{self._busy('train', '  train busy {}')}  {self._tokens_per_s} tokens/s"
                f"  remaining {timedelta(seconds=remaining)}{self._truncation_warning('  ')}"
            )

    def evaluation_done(self, step: int, scores: Metrics) -> None:
        self._evaluations.append((step, scores["reward"]))
        if not self._live:
            self._print(
                f"evaluation of step {step}: reward {scores['reward']:.3f}, {_pass_rates(scores)}, "
                f"{scores['prompts']:.0f} prompts in {scores['seconds']:.1f} s"
            )

    def engines_polled(self, engines: Sequence[EngineStats], queue_utilization: float) -> None:
        self._queue_utilization = queue_utilization
        self._generated = sum(e.tokens for e in engines)
        if engines:
            self._rollout_busy.add_report(
                sum(e.busy_s for e in engines) / len(engines),
                sum(e.age_s for e in engines) / len(engines),
                time.perf_counter(),
            )
        if not self._live and time.perf_counter() - self._last_line > STATUS_INTERVAL_S:
            self._print(
                f"still running: {self._generated:,} tokens generated, "
                f"queue {queue_utilization:.0%} full"
            )

    def _print(self, line: str) -> None:
        self._last_line = time.perf_counter()
        self._console.print(line, highlight=False, soft_wrap=True)

    def _update_rates(self, generating_s: float) -> None:
        """Compute rates over whole steps, because alternating phases look idle or busy in shorter
        windows."""
        now = time.perf_counter()
        while len(self._window) > 1 and now - self._window[1][0] >= RATE_WINDOW_S:
            self._window.popleft()
        start, before = self._window[0]
        self._rollout_busy.add_step(generating_s, now)
        self._rates = {}
        if now > start:
            self._rates = {
                name: (total - before[name]) / (now - start) for name, total in self._totals.items()
            }
        if (rollout := self._rollout_busy.fraction(start, now)) is not None:
            self._rates["rollout"] = rollout
        self._window.append((now, dict(self._totals)))

    def _teacher_kl(self, prefix: str) -> str:
        """Return the KL to the teacher, if there is one."""
        value = self._metrics.get("distill/kl")
        return "" if value is None else f"{prefix}{value:.3f}"

    def _truncation_warning(self, prefix: str) -> str:
        """Return a warning if most completions are truncated and rewards score unfinished text."""
        fraction = self._metrics.get("rollout/truncated_fraction", 0.0)
        if fraction <= TRUNCATION_WARNING_FRACTION:
            return ""
        return f"{prefix}{fraction:.0%} of completions truncated at rollout.max_response_length"

    def _busy(self, name: str, template: str) -> str:
        """Return the text with the busy fraction in it; nothing if it is not known."""
        return template.format(f"{min(1.0, self._rates[name]):.0%}") if name in self._rates else ""

    @property
    def _tokens_per_s(self) -> str:
        return f"{self._rates.get('tokens', 0.0):,.0f}"

    def _panel(self) -> Panel:
        m = self._metrics
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", justify="right")
        grid.add_column()
        if not m:
            grid.add_row("", f"generating the first groups … {self._generated:,} tokens so far")
            return self._framed(Stack(self._progress, grid))
        rows: dict[str, str | Text] = {
            "reward": _styled(
                f"[bold]{m['reward/mean']:.3f}[/]  [green]{_sparkline(self._rewards)}[/]"
            ),
            **self._evaluation_row(),
            **({"KL to teacher": kl} if (kl := self._teacher_kl("")) else {}),
            "staleness": f"mean {m['staleness/mean']:.2f}   "
            f"max {m['staleness/max']:.0f} of {self._max_staleness} allowed",
            "queue": _gauge(self._queue_utilization, f"{self._queue_utilization:.0%} full"),
            "rollout": _gauge(
                self._rates.get("rollout", 0.0),
                f"{self._busy('rollout', '{} busy   ')}{self._tokens_per_s} tokens/s trained",
            ),
            "train": _gauge(
                self._rates.get("train", 0.0),
                f"{self._busy('train', '{} busy   ')}lr {m.get('train/lr', 0):.1e}",
            ),
        }
        if devices := describe_metrics(m):
            rows["devices"] = Text(devices, no_wrap=True, overflow="ellipsis")
        for name, text in rows.items():
            grid.add_row(name, text)
        if warning := self._truncation_warning(""):
            grid.add_row("", Text(warning, style="yellow"))
        sample = Text(printable(self._sample), no_wrap=True, overflow="ellipsis")
        return self._framed(Stack(self._progress, grid, sample))

    def _evaluation_row(self) -> dict[str, Text]:
        if not self._evaluations:
            return {}
        step, reward = self._evaluations[-1]
        rewards = [value for _, value in self._evaluations[-48:]]
        return {
            "held out": _styled(
                f"[bold]{reward:.3f}[/]  [green]{_sparkline(rewards)}[/]  of step {step}"
            )
        }

    def _framed(self, content: Stack) -> Panel:
        title = Text(printable(self._title))
        return Panel(content, title=title, width=min(88, self._console.width), border_style="cyan")


def print_summary(console: Console, summary: dict[str, Any], run_dir: str) -> None:
    """Print the table at the end of a run."""
    table = Table(
        title="Run summary",
        show_header=False,
        title_justify="left",
        min_width=min(60, console.width),
    )
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    ledger = summary["ledger"]
    dropped = sum(ledger["dropped"].values())
    rows: dict[str, str | Text] = {
        "reward, first → last": _change(summary["reward_first"], summary["reward_last"]),
        **_evaluation_rows(summary.get("evaluation")),
        **_distill_row(summary),
        "steps": f"{summary['steps']}  ({summary['steps_per_s']:.2f} per second)",
        "samples, tokens per second": f"{summary['samples_per_s']:,.0f}, "
        f"{summary['tokens_per_s']:,.0f}",
        "staleness, mean and max": f"{summary['staleness_mean']:.2f}, {summary['staleness_max']}",
        "sample age": f"{summary['mean_sample_age_s']:.2f} s",
        "weight sync": f"{summary['sync_latency_s'] * 1000:.1f} ms",
        "busy: rollout, train": f"{summary['rollout_busy_fraction']:.0%}, "
        f"{summary['train_busy_fraction']:.0%}",
        **_device_rows(summary.get("device_time")),
        **_prediction_row(summary.get("prediction")),
        "peak memory": f"{summary['memory_peak_bytes'] / 2**30:.2f} GiB",
        **_memory_rows(summary.get("memory_phases", {}), summary.get("memory_planned", {})),
        "ledger": f"{ledger['issued']} issued = {ledger['trained']} trained + {dropped} dropped "
        f"+ {ledger['outstanding']} unfinished",
    }
    if replaced := summary.get("fleet", {}).get("replaced"):
        rows["rollout workers replaced"] = str(replaced)
    rows |= {"run directory": run_dir, "samples": f"paceline samples {quote(str(run_dir))}"}
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def _pass_rates(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {scores[name]:.3f}" for name in scores if name.startswith("pass@"))


def _evaluation_rows(found: Mapping[str, Mapping[str, float]] | None) -> dict[str, str | Text]:
    """Return the mean reward on held-out prompts, if there were any."""
    if not found:
        return {}
    first, last, best = (found[name] for name in ("first", "last", "best"))
    return {
        "held out, first → last": _change(first["reward"], last["reward"]),
        "held out, best": f"{best['reward']:.3f} at step {best['step']}, {_pass_rates(best)}",
    }


def _distill_row(summary: dict[str, Any]) -> dict[str, Text]:
    if "distill_kl_first" not in summary:
        return {}
    first, last = summary["distill_kl_first"], summary["distill_kl_last"]
    return {"KL to teacher, first → last": _change(first, last)}


def _device_rows(found: Mapping[str, float] | None) -> dict[str, str]:
    """Return what the devices did, if it was measured."""
    if not found:
        return {}
    seconds = {name.removesuffix("_s"): value for name, value in found.items()}
    return {
        "device time": describe(seconds, found["total_s"]),
        "speed of light": f"{found['speed_of_light']:.0%}",
    }


def _prediction_row(found: Mapping[str, Any] | None) -> dict[str, str]:
    return {"prediction": str(found["text"])} if found else {}


def _change(first: float | None, last: float | None) -> Text:
    if first is None or last is None:  # no step was made: evaluation.target was reached before
        return Text("unknown")
    return _styled(f"{first:.3f} → [bold green]{last:.3f}[/]")


def _memory_rows(phases: Mapping[str, int], planned: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return a row per rank with its peak in each phase, if ranks alternate between phases.

    The last row has what `paceline plan` predicts.
    """
    ranks: dict[str, list[str]] = {}
    for name, size in phases.items():
        if match := re.fullmatch(r"rank_(\d+)_(generate|train|sync)", name):
            shown = f"{match[2]} {size / 2**30:.2f}"
            ranks.setdefault(f"memory of rank {match[1]}, GiB", []).append(shown)
    rows = {name: ", ".join(sorted(parts)) for name, parts in sorted(ranks.items())}
    if rows and planned:
        rows["memory planned, GiB"] = ", ".join(
            f"{phase} {_span(*sizes)}" for phase, sizes in sorted(planned.items())
        )
    return rows


def _span(least: int, most: int) -> str:
    low, high = f"{least / 2**30:.2f}", f"{most / 2**30:.2f}"
    return low if low == high else f"{low} to {high}"


def workers_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of `paceline workers list`."""
    table = Table(title="Rollout workers", title_justify="left")
    for heading in ("name", "node", "state", "version", "load", "tokens/s", "incarnation"):
        table.add_column(
            heading, justify="left" if heading in ("name", "node", "state") else "right"
        )
    for row in rows:
        color = {"live": "green", "dead": "red"}.get(row["state"], "yellow")
        numbers = (row["version"], row["load"], f"{row['tokens_per_s']:,.0f}", row["incarnation"])
        table.add_row(row["name"], row["node"], Text(row["state"], color), *map(str, numbers))
    return table


def _sparkline(values: Sequence[float]) -> str:
    low, high = min(values), max(max(values), min(values) + 1e-9)
    return "".join(
        SPARKS[round((value - low) / (high - low) * (len(SPARKS) - 1))] for value in values
    )


def _gauge(fraction: float, text: str, width: int = 20) -> Text:
    full = round(max(0.0, min(1.0, fraction)) * width)
    return _styled(f"[cyan]{'━' * full}[/][dim]{'━' * (width - full)}[/] {text}")


def _styled(markup: str) -> Text:
    """Return text with styles. Only for text of Paceline: data could contain markup."""
    return Text.from_markup(markup)
