"""The commands that show something and change nothing: plans, samples, tasks and settings."""

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

from paceline.cli.app import app, console, fail, log_to_console, warn
from paceline.cli.arguments import recipe_argument, settings_argument
from paceline.errors import ConfigError, PacelineError

MAX_ROWS = 20  # of a replayed batch that are listed


@app.command()
def plan(
    recipe: Annotated[Path, recipe_argument("Recipe, for example recipes/split.toml")],
    settings: Annotated[list[str] | None, settings_argument()] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Plan for a cluster that is not there: nodes x GPUs : memory of a GPU, for "
            "example 4x8:80GB, or 8:24GB",
            show_default=False,
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Plan for a model of this size instead of the recipe's: 0.5b, 1.5b, 3b, 7b, 14b, "
            "32b or 70b",
            show_default=False,
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Measure engine and trainer for some 20 s, predict the speed of every mode, and "
            "propose one with its settings.",
        ),
    ] = False,
    costs: Annotated[
        Path,
        typer.Option(
            help="File for the costs that --probe measures; prediction.json is beside it."
        ),
    ] = Path("costs.json"),
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Lengths of completions that --probe predicts for, as in `paceline simulate`.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show which devices each role gets and the memory of each phase. Starts no workers, unless
    they are probed."""
    from paceline.config import check_trainable, load_config
    from paceline.early_checks import check_early

    try:
        if probe and shape:
            raise ConfigError(
                f"--probe contradicts --shape {shape}: only the recipe's model can be measured; "
                "leave out one of them"
            )
        if lengths and not probe:
            raise ConfigError(
                f"--lengths {lengths} needs --probe, which predicts the speed; add --probe, or "
                "leave out --lengths"
            )
        config = load_config(recipe, settings or ())
        check_trainable(config)
        # A plan needs neither prompts nor a reward, but what the settings name must exist.
        no_rows, no_reward = config.data.path is None, config.reward.function is None
        if not devices and not shape:
            check_early(config, has_rows=no_rows, has_reward=no_reward)
        log_to_console()
        with console.status("loading torch and transformers …"):
            from paceline.inputs import prepare_model
            from paceline.observe.plan import plan_tables
            from paceline.observe.terminal import ModelProgress
        if not devices and not shape:
            with ModelProgress(console) as preparing:
                prepare_model(config, preparing)
        tables, warnings = asyncio.run(plan_tables(config, devices, shape))
    except PacelineError as error:
        fail(error)
    for table in tables:
        console.print(table)
    for warning in warnings:
        warn(warning)
    if probe:
        from paceline.cli.simulate import probe_and_propose

        probe_and_propose(recipe, settings or [], costs, devices, lengths)


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
    log_to_console()
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
