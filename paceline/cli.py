"""The `paceline` command: its subcommands and what they print.

Large dependencies are imported where they are used, so `paceline --help` does not import torch.
"""

import asyncio
import difflib
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from paceline import __version__
from paceline.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from paceline.config import RunConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
workers = typer.Typer(
    no_args_is_help=True, help="List, add and remove the rollout workers of a running job."
)
app.add_typer(workers, name="workers")
RunDir = Annotated[
    Path,
    typer.Argument(
        help="Run directory of a running job, for example runs/fully_async", show_default=False
    ),
]
console = Console()


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for language models."""


@app.command()
def train(
    recipe: Annotated[
        Path,
        typer.Argument(help="Recipe, for example recipes/fully_async.toml", show_default=False),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value, for example steps=50 schedule.max_staleness=4", show_default=False
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; move an existing run directory aside.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the settings, print them as JSON and exit."),
    ] = False,
) -> None:
    """Train a model. If the run directory has an earlier run, the same command resumes it."""
    from paceline.config import check_trainable, load_config

    stopped_by = signal.SIGINT

    def terminate(*_: object) -> None:
        nonlocal stopped_by
        stopped_by = signal.SIGTERM
        signal.raise_signal(signal.SIGINT)  # stop in the same way as with Ctrl-C

    # A shell starts background jobs with SIGINT ignored; without a handler for SIGINT, `terminate`
    # would have no effect there.
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, terminate)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    config: RunConfig | None = None
    try:
        config = load_config(recipe, settings or ())
        check_trainable(config)
        if dry_run:
            console.print_json(config.model_dump_json())
            return
        _train(config, fresh)
    except PacelineError as error:
        _fail(error)
    except KeyboardInterrupt:
        console.print(f"\nstopped{_how_to_resume(config, fresh)}", highlight=False, soft_wrap=True)
        raise typer.Exit(128 + stopped_by) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@app.command()
def evaluate(
    recipe: Annotated[
        Path, typer.Argument(help="Recipe, for example recipes/gsm8k.toml", show_default=False)
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value, for example model=runs/x/checkpoints/step_00000100/actor "
            "data.path=test.jsonl",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            "--samples",
            "-n",
            min=1,
            help="Completions per prompt: 1 is greedy unless rollout.top_p or rollout.top_k "
            "is set, more are sampled.",
        ),
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score a model on every row of the data, without training it."""
    from paceline.config import load_config

    try:
        config = load_config(recipe, settings or ())
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        _log_to_console()
        with console.status("loading torch and transformers …") as status:
            from paceline.evaluate import evaluate, for_evaluation

            chosen = for_evaluation(config, samples)

            def show_progress(done: int, total: int) -> None:
                status.update(f"{done} of {total} prompts completed …")
                if not console.is_terminal and not as_json and done % max(1, total // 10) == 0:
                    console.print(f"{done} of {total} prompts completed", highlight=False)

            found = asyncio.run(evaluate(chosen, show_progress))
    except PacelineError as error:
        _fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    if as_json:
        console.print_json(data=found)
    else:
        for name, value in found.items():
            console.print(f"{name:20} {value:.4g}", highlight=False)


@app.command()
def plan(
    recipe: Annotated[
        Path, typer.Argument(help="Recipe, for example recipes/split.toml", show_default=False)
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(help="key=value", show_default=False)
    ] = None,
) -> None:
    """Show which devices each role gets and whether it fits into memory. Starts no workers."""
    from paceline.config import check_trainable, load_config

    try:
        config = load_config(recipe, settings or ())
        check_trainable(config)
        _log_to_console()
        with console.status("loading torch and transformers …"):
            from paceline.observe.plan import plan_table
        table, warnings = asyncio.run(plan_table(config))
    except PacelineError as error:
        _fail(error)
    console.print(table)
    for warning in warnings:
        _warn(warning)


@workers.command("list")
def list_workers(
    run: RunDir, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """List the rollout workers with their node, state, weight version and load."""
    from paceline.observe.display import workers_table

    rows = _send(run, "list")
    if as_json:
        console.print_json(data=rows)
    else:
        console.print(workers_table(rows))


@workers.command("add")
def add_workers(
    run: RunDir,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Number of workers.")] = 1,
) -> None:
    """Start more rollout workers. They get prompts once they have the current weights."""
    console.print(f"added {', '.join(_send(run, 'add', count=count))}", highlight=False)


@workers.command("remove")
def remove_worker(
    run: RunDir,
    name: Annotated[str, typer.Argument(help="Name in `workers list`.", show_default=False)],
) -> None:
    """Remove a rollout worker. Other workers resume its unfinished completions."""
    _send(run, "remove", name=name)
    console.print(f"removed {name}", highlight=False)


@app.command()
def pause(run: RunDir) -> None:
    """Pause generation in a running job until `paceline resume`."""
    _send(run, "pause")
    console.print(f"{run} is paused; to continue: paceline resume {run}", highlight=False)


@app.command()
def resume(run: RunDir) -> None:
    """Resume a paused job."""
    _send(run, "resume")
    console.print(f"{run} is running again", highlight=False)


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
        _fail(error)


@app.command()
def tasks() -> None:
    """List the built-in tasks."""
    from paceline.data.tasks import describe_tasks

    for name, description in describe_tasks():
        console.print(f"[bold]{name:12}[/] {description}", highlight=False)


@app.command()
def settings(
    prefix: Annotated[
        str,
        typer.Argument(
            help="List only settings that start with this, for example rollout", show_default=False
        ),
    ] = "",
) -> None:
    """List all settings with their defaults."""
    from rich.table import Table

    from paceline.config import describe_settings

    found = describe_settings(prefix)
    if not found:
        names = [name for name, _, _ in describe_settings()]
        known = {name.rsplit(".", 1)[-1]: name for name in names} | {name: name for name in names}
        known |= {name.split(".")[0]: name.split(".")[0] for name in names}
        close = difflib.get_close_matches(prefix, known, n=1)
        hint = f"did you mean {known[close[0]]!r}?" if close else "run: paceline settings"
        _fail(ConfigError(f"no setting starts with {prefix!r}; {hint}"))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, default, meaning in found:
        table.add_row(f"[bold]{name}[/]", f"[cyan]{escape(default)}[/]", escape(meaning))
    console.print(table, highlight=False)


def _train(config: "RunConfig", fresh: bool) -> None:
    from paceline.observe.display import Display, print_summary

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    _log_to_console()
    with console.status("loading torch and transformers …") as status:
        from paceline.inputs import prepare_model
        from paceline.run import train

        prepare_model(
            config,
            lambda step, total: status.update(
                f"warming up the tiny model (only once): step {step} of {total} …"
            ),
        )
        status.update("loading the model and starting the workers …")
        if not console.is_terminal:
            console.print("loading the model and starting the workers …")
        display: Display | None = None

        def make_display(first_step: int) -> Display:
            nonlocal display
            status.stop()
            data = config.data.task or config.data.path
            title = f"{config.run_dir}: {config.algorithm.name}, {data}"
            display = Display(
                console, title, config.steps, first_step, config.schedule.max_staleness
            )
            return display.__enter__()

        try:
            summary = asyncio.run(train(config, make_display, fresh=fresh))
        finally:
            if display:
                display.__exit__(None, None, None)
    if display is None:
        console.print(
            f"{config.run_dir} is complete: {summary['steps']} of {config.steps} steps. "
            "Raise steps= to continue, or start over with --fresh",
            highlight=False,
            soft_wrap=True,
        )
    print_summary(console, summary, config.run_dir)


def _how_to_resume(config: "RunConfig | None", fresh: bool) -> str:
    """Return what the same command would do next, to follow the word "stopped"."""
    if config is None:
        return ""
    steps = sorted(path.name for path in Path(config.run_dir, "checkpoints").glob("step_*"))
    if not steps:
        return (
            f" before the first checkpoint (save_every = {config.save_every}); "
            "the same command starts over"
        )
    step = int(steps[-1].removeprefix("step_"))
    return f"; the same command {'without --fresh ' if fresh else ''}continues from step {step}"


def _send(run: Path, command: str, **arguments: Any) -> Any:
    from paceline.control import send_command

    try:
        return send_command(run, command, **arguments)
    except PacelineError as error:
        _fail(error)


class _Warnings(logging.Handler):
    """Handler that shows Paceline's warnings to the user; tracebacks are only in the log files."""

    def emit(self, record: logging.LogRecord) -> None:
        if not record.exc_info:  # the error that ends the run is printed in any case
            _warn(record.getMessage())


def _warn(message: str) -> None:
    console.print(f"[yellow]warning:[/] {escape(message)}", highlight=False, soft_wrap=True)


def _log_to_console() -> None:
    logging.getLogger("paceline").handlers = [_Warnings(logging.WARNING)]


def _fail(error: PacelineError) -> NoReturn:
    """Print the error without a traceback and exit with its exit code."""
    message = "\n".join([str(error), *getattr(error, "__notes__", [])])
    Console(stderr=True).print(
        "[bold red]error:[/]", escape(message), highlight=False, soft_wrap=True
    )
    raise typer.Exit(error.exit_code)


if __name__ == "__main__":
    app()
