"""The command line. Nothing heavy is imported before it is needed: `paceline --help` loads no
torch."""

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from paceline import __version__
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.config import RunConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
workers = typer.Typer(
    no_args_is_help=True, help="Rollout workers of a running job: they may come and go."
)
app.add_typer(workers, name="workers")
RunFolder = Annotated[
    Path,
    typer.Argument(
        help="The run folder of a running job, for example runs/fully_async", show_default=False
    ),
]
console = Console()


@app.callback()
def main() -> None:
    """Asynchronous reinforcement learning for language models."""


@app.command()
def train(
    recipe: Annotated[
        Path,
        typer.Argument(help="A recipe, for example recipes/fully_async.toml", show_default=False),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value, for example steps=50 schedule.max_staleness=4", show_default=False
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over: an existing run folder is moved aside.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the settings, print them all as JSON, and stop."),
    ] = False,
) -> None:
    """Train a model. The same command on an existing run folder continues that run."""
    from paceline.config import check_trainable, load_config

    stopped_by = signal.SIGINT

    def terminate(*_: object) -> None:
        nonlocal stopped_by
        stopped_by = signal.SIGTERM
        signal.raise_signal(signal.SIGINT)  # a scheduler's way to say Ctrl-C

    # a shell that starts a job in the background has it ignore Ctrl-C, and then a scheduler's
    # signal would be ignored, too
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
        console.print(f"\nstopped{_going_on(config, fresh)}", highlight=False, soft_wrap=True)
        raise typer.Exit(128 + stopped_by) from None
    finally:
        for number, how in before.items():
            signal.signal(number, how)


@app.command()
def evaluate(
    recipe: Annotated[
        Path, typer.Argument(help="A recipe, for example recipes/gsm8k.toml", show_default=False)
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value, for example model=runs/x/checkpoints/step_00000100/actor data.path=test.jsonl",
            show_default=False,
        ),
    ] = None,
    attempts: Annotated[
        int,
        typer.Option(
            "--attempts",
            "-n",
            min=1,
            help="Completions per prompt: 1 is greedy unless rollout.top_p or rollout.top_k "
            "is set, more are sampled.",
        ),
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Score a model on every row of its data, without training it."""
    from paceline.config import load_config

    try:
        config = load_config(recipe, settings or ())
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        _log_to_console()
        with console.status("loading torch and transformers …") as status:
            from paceline.evaluate import evaluate, for_evaluation

            chosen = for_evaluation(config, attempts)

            def tell(done: int, of: int) -> None:
                status.update(f"{done} of {of} prompts answered …")
                if not console.is_terminal and not as_json and done % max(1, of // 10) == 0:
                    console.print(f"{done} of {of} prompts answered", highlight=False)

            found = asyncio.run(evaluate(chosen, tell))
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
        Path, typer.Argument(help="A recipe, for example recipes/split.toml", show_default=False)
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(help="key=value", show_default=False)
    ] = None,
) -> None:
    """Show which role gets which device, and refuse what cannot fit, without starting anything."""
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
    run: RunFolder, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False
) -> None:
    """Show the rollout workers: where they are, what they have and do."""
    from paceline.observe.display import workers_table

    rows = _ask(run, "list")
    if as_json:
        console.print_json(data=rows)
    else:
        console.print(workers_table(rows))


@workers.command("add")
def add_workers(
    run: RunFolder,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many.")] = 1,
) -> None:
    """Start more rollout workers; they take work as soon as they have the current weights."""
    console.print(f"added {', '.join(_ask(run, 'add', count=count))}", highlight=False)


@workers.command("remove")
def remove_worker(
    run: RunFolder,
    name: Annotated[str, typer.Argument(help="As `workers list` shows it.", show_default=False)],
) -> None:
    """Let a rollout worker go; the others finish its answers from where they are."""
    _ask(run, "remove", name=name)
    console.print(f"removed {name}", highlight=False)


@app.command()
def pause(run: RunFolder) -> None:
    """Pause generation in a running job. It waits, for as long as you like."""
    _ask(run, "pause")
    console.print(f"{run} is paused; go on with: paceline resume {run}", highlight=False)


@app.command()
def resume(run: RunFolder) -> None:
    """Go on with a paused job."""
    _ask(run, "resume")
    console.print(f"{run} goes on", highlight=False)


@app.command()
def answers(
    run: Annotated[
        Path, typer.Argument(help="A run folder, for example runs/fully_async", show_default=False)
    ],
    step: Annotated[
        int | None, typer.Option(help="Which step; the last one if not given.", show_default=False)
    ] = None,
) -> None:
    """Show what the model answered, best first, with rewards: some prompts of a step
    (save_samples)."""
    from paceline.observe.samples import answers_panel, read_answers

    try:
        for row in read_answers(run, step):
            console.print(answers_panel(row))
    except PacelineError as error:
        _fail(error)


@app.command()
def tasks() -> None:
    """List the built-in tasks."""
    from paceline.data.tasks import describe_tasks

    for name, what in describe_tasks():
        console.print(f"[bold]{name:12}[/] {what}", highlight=False)


@app.command()
def settings(
    under: Annotated[
        str,
        typer.Argument(
            help="Only those whose names begin so, for example rollout", show_default=False
        ),
    ] = "",
) -> None:
    """List all settings, with what they are when nothing is said."""
    from rich.table import Table

    from paceline.config import describe_settings

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, default, meaning in describe_settings(under):
        table.add_row(f"[bold]{name}[/]", f"[cyan]{escape(default)}[/]", escape(meaning))
    console.print(table, highlight=False)


@app.command()
def version() -> None:
    """Print the version."""
    console.print(__version__, highlight=False)


def _train(config: "RunConfig", fresh: bool) -> None:
    from paceline.observe.display import Display, closing_table

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    _log_to_console()
    folder = Path(config.run_dir)
    with console.status("loading torch and transformers …") as status:
        from paceline.inputs import prepare_model
        from paceline.run import train

        prepare_model(
            config,
            lambda step, total: status.update(
                f"warming up the tiny model, once: step {step} of {total} …"
            ),
        )
        status.update("loading the model and starting the workers …")
        if not console.is_terminal:
            console.print("loading the model and starting the workers …")
        display: Display | None = None

        def make_display(first_step: int) -> Display:
            nonlocal display
            status.stop()
            title = f"{folder}: {config.algorithm.name}, {config.data.task or config.data.path}"
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
        done = f"{folder} has made {summary['steps']} of {config.steps} steps already; raise steps= to go on, or start over with --fresh"
        console.print(done, highlight=False, soft_wrap=True)
    closing_table(console, summary, str(folder))


def _going_on(config: "RunConfig | None", fresh: bool) -> str:
    """What the same command would do next."""
    if config is None:
        return ""
    steps = sorted(path.name for path in Path(config.run_dir, "checkpoints").glob("step_*"))
    if not steps:
        return f" before the first checkpoint (save_every = {config.save_every}); the same command begins anew"
    return f"; the same command {'without --fresh ' if fresh else ''}continues from step {int(steps[-1].removeprefix('step_'))}"


def _ask(run: Path, command: str, **arguments: Any) -> Any:
    from paceline.control import send_command

    try:
        return send_command(run, command, **arguments)
    except PacelineError as error:
        _fail(error)


class _Warnings(logging.Handler):
    """Our own warnings are for the user; other libraries' are not, and tracebacks belong in the
    logs."""

    def emit(self, record: logging.LogRecord) -> None:
        if not record.exc_info:  # what went wrong ends the run, in its own words
            _warn(record.getMessage())


def _warn(message: str) -> None:
    console.print(f"[yellow]warning:[/] {escape(message)}", highlight=False, soft_wrap=True)


def _log_to_console() -> None:
    logging.getLogger("paceline").handlers = [_Warnings(logging.WARNING)]


def _fail(error: PacelineError) -> NoReturn:
    """Say what went wrong in its own words; the traceback goes to nobody's face."""
    message = "\n".join([str(error), *getattr(error, "__notes__", [])])
    Console(stderr=True).print(
        "[bold red]error:[/]", escape(message), highlight=False, soft_wrap=True
    )
    raise typer.Exit(error.exit_code)


if __name__ == "__main__":
    app()
