"""The commands that show something and change nothing: samples, tasks, metrics and settings."""

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from paceline.cli.app import app, console, fail, log_to_console
from paceline.errors import ConfigError, PacelineError

MAX_ROWS = 20  # of a replayed batch that are listed


@app.command()
def samples(
    run: Annotated[
        Path, typer.Argument(help="Run directory, for example runs/fully_async", show_default=False)
    ],
    step: Annotated[
        int | None, typer.Option(help="Train step. Default: the last one.", show_default=False)
    ] = None,
) -> None:
    """Show saved completions of a step with their rewards, best first (see save_samples)."""
    from paceline.observe.samples import read_samples, samples_panel

    try:
        for row in read_samples(run, step):
            console.print(samples_panel(row))
    except PacelineError as error:
        fail(error)


@app.command()
def replay(
    dump: Annotated[
        Path,
        typer.Argument(
            help="Batch of a skipped update, for example "
            "runs/fully_async/skipped/step_00000036_0.npz",
            show_default=False,
        ),
    ],
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint or model to compute with. Default: the last checkpoint of the run "
            "up to that step, or its model.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Repeat a skipped update without training: its loss, its gradient and the rows at fault."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    log_to_console(as_json)
    try:
        with console.status("loading torch and transformers …"):
            from paceline.replay import replay_dump

            found = asyncio.run(replay_dump(dump, weights))
    except PacelineError as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    if as_json:
        sys.stdout.write(json.dumps(asdict(found)) + "\n")
        return
    note = "" if found.same_weights else ", which are not those of the skipped update"
    lines = [f"step {found.step} with the weights of {found.weights}{note}"]
    for number, update in enumerate(found.result["updates"], 1):
        lines.append(f"update {number}: loss {update['loss']:g}, gradient {update['grad_norm']:g}")
    rows = found.result["rows"]
    lines.append(f"{len(rows)} of {found.rows} rows are not finite")
    lines += [
        f"  row {row['row']} (group {row['group']}): {', '.join(row['not finite'])}"
        for row in rows[:MAX_ROWS]
    ]
    lines += [f"  … and {len(rows) - MAX_ROWS} more (--json has all)"] * (len(rows) > MAX_ROWS)
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


@app.command()
def tasks() -> None:
    """List the built-in tasks."""
    from paceline.data.tasks import describe_tasks

    for name, description in describe_tasks():
        console.print(Text(f"{name:12}", "bold"), description, highlight=False)


@app.command()
def environments() -> None:
    """List the environments of rollout.environment and the tools of rollout.tools."""
    from paceline.environment.lookup import describe_environments
    from paceline.environment.tools import DESCRIPTIONS

    for title, rows in (("environments", describe_environments()), ("tools", DESCRIPTIONS)):
        console.print(Text(title, "underline"))
        for name, description in rows:
            console.print(Text(f"{name:20}", "bold"), description, highlight=False)


@app.command()
def metrics(
    prefix: Annotated[
        str, typer.Argument(help="List only these metrics, for example train", show_default=False)
    ] = "",
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/metrics.md.")] = False,
) -> None:
    """List the metrics of a train step with unit and meaning."""
    from rich.table import Table

    from paceline.observe.metric_names import METRICS, markdown

    if as_markdown:
        sys.stdout.write(markdown())
        return
    found = [metric for metric in METRICS if prefix in metric.name]
    if not found:
        fail(ConfigError(f"no metric contains {prefix!r}; paceline metrics lists all"))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for metric in found:
        table.add_row(Text(metric.name, "bold"), Text(metric.unit, "cyan"), metric.meaning)
    console.print(table, highlight=False)


@app.command()
def settings(
    prefix: Annotated[
        str,
        typer.Argument(
            help="List only these settings, for example rollout or learning_rate",
            show_default=False,
        ),
    ] = "",
    sft: Annotated[
        bool, typer.Option("--sft", help="List the settings of `paceline sft`.")
    ] = False,
) -> None:
    """List all settings with their defaults."""
    from rich.table import Table

    from paceline.config import RunConfig, describe_settings
    from paceline.hints import suggest
    from paceline.supervised.config import SftConfig

    model = SftConfig if sft else RunConfig
    found = describe_settings(prefix, model)
    if not found:
        fail(ConfigError(f"no setting contains {prefix!r}; {suggest(prefix, model)}"))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, default, meaning in found:
        table.add_row(Text(name, "bold"), Text(default, "cyan"), meaning)
    console.print(table, highlight=False)
