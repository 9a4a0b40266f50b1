"""The commands that run a model: `train`, `sft` and `evaluate`."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from paceline.cli.app import app, console, errors, fail, log_to_console
from paceline.cli.arguments import recipe_argument, settings_argument
from paceline.cli.completion import complete_sft_setting
from paceline.errors import PacelineError
from paceline.supervisor import (
    FORWARDED,
    Supervisor,
    end_with_supervisor,
    is_restart,
    saved_step,
    this_program,
)

if TYPE_CHECKING:
    from paceline.background import Background
    from paceline.config import RunConfig
    from paceline.job import Run
    from paceline.supervised.config import SftConfig

Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start over; move an existing run directory aside.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check the settings, print them as JSON and exit.")
]
StartFrom = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="Start from an earlier step of the run, or from a checkpoint of another run, with "
        "its optimizer state.",
        show_default=False,
    ),
]
Restart = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="If the run dies, restart it from its last checkpoint, up to N times without a "
        "new checkpoint.",
    ),
]

ConfigT = TypeVar("ConfigT", bound="RunConfig | SftConfig")

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@app.command()
def train(
    recipe: Annotated[Path, recipe_argument("Recipe, for example recipes/fully_async.toml")],
    settings: Annotated[
        list[str] | None, settings_argument("steps=50 schedule.max_staleness=4")
    ] = None,
    fresh: Fresh = False,
    start_from: StartFrom = None,
    dry_run: DryRun = False,
    restart: Restart = 0,
) -> None:
    """Train a model. If the run directory has an earlier run, the same command resumes it."""
    from paceline.config import check_trainable, load_config

    def load() -> "RunConfig":
        config = load_config(recipe, settings or ())
        check_trainable(config)
        return config

    def start(config: "RunConfig") -> "Background[Run]":
        if is_restart() and config.cluster == "ray":
            from paceline.workers.ray.joining import start_last_workers

            start_last_workers(config)
        from paceline.job import Job
        from paceline.observe.terminal import Terminal

        return Job(config).train(fresh, Terminal(config, console), start_from=start_from)

    options = _Options(fresh, start_from, dry_run, restart)
    _run(["train", str(recipe), *(settings or ())], load, start, options)


@app.command()
def sft(
    recipe: Annotated[Path, recipe_argument("Recipe, for example recipes/sft.toml")],
    settings: Annotated[
        list[str] | None,
        settings_argument("data.path=examples.jsonl epochs=2", complete_sft_setting),
    ] = None,
    fresh: Fresh = False,
    start_from: StartFrom = None,
    dry_run: DryRun = False,
    restart: Restart = 0,
) -> None:
    """Fine-tune a model on completions, before reinforcement learning. The same command resumes."""
    from paceline.supervised.config import load_sft_config

    def load() -> "SftConfig":
        return load_sft_config(recipe, settings or ())

    def start(config: "SftConfig") -> "Background[Run]":
        from paceline.supervised.display import SftTerminal
        from paceline.supervised.job import SftJob

        return SftJob(config).start(fresh, SftTerminal(config, console), start_from)

    options = _Options(fresh, start_from, dry_run, restart)
    _run(["sft", str(recipe), *(settings or ())], load, start, options)


@app.command()
def evaluate(
    recipe: Annotated[Path, recipe_argument("Recipe, for example recipes/gsm8k.toml")],
    settings: Annotated[
        list[str] | None,
        settings_argument("model=runs/x/checkpoints/step_00000100/actor data.path=test.jsonl"),
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
        console.continues = True
        log_to_console(as_json)
        with console.status("loading torch and transformers …") as status, ExitStack() as stack:
            from paceline.job import Job
            from paceline.observe.terminal import DeviceLines, ModelProgress

            preparing = None
            if not as_json:
                stack.enter_context(DeviceLines(console))
                preparing = stack.enter_context(ModelProgress(console, status))

            def show_progress(done: int, total: int) -> None:
                status.update(f"{done} of {total} prompts completed …")
                if not console.is_terminal and not as_json and done % max(1, total // 10) == 0:
                    console.print(f"{done} of {total} prompts completed", highlight=False)

            found = Job(config).evaluate(samples, show_progress, preparing).result()
        console.require_output()
    except PacelineError as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    if as_json:
        console.print_json(data=found)
    else:
        for name, value in found.items():
            console.print(f"{name:20} {shown(value)}", highlight=False)


def shown(value: float) -> str:
    """Return a number with four digits, or with all digits before the point if it has more."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


@dataclass(frozen=True)
class _Options:
    """The options of `train` and `sft`."""

    fresh: bool
    start_from: str | None
    dry_run: bool
    restart: int

    def once(self) -> list[str]:
        """Return the options of the first attempt only."""
        start_from = ["--from", self.start_from] if self.start_from is not None else []
        return [*["--fresh"] * self.fresh, *start_from]


def _run(
    command: list[str],
    load: "Callable[[], ConfigT]",
    start: "Callable[[ConfigT], Background[Run]]",
    options: _Options,
) -> None:
    """Load the settings of a command and run it, in a child process if it may be restarted."""
    once = options.once()
    if options.restart and not options.dry_run:
        raise typer.Exit(_supervise(command, load, once, options.restart))
    supervised = end_with_supervisor()
    from paceline.job import check_start

    without = " and ".join(option for option in once if option.startswith("--"))
    with stopped_by_signals(without, supervised) as run:
        config = load()
        check_start(options.fresh, options.start_from)
        if options.dry_run:
            console.print_json(config.model_dump_json())
            return
        run.config = config
        console.continues = True
        log_to_console()
        start(config).result()


def _supervise(
    command: list[str],
    load: "Callable[[], RunConfig | SftConfig]",
    once: list[str],
    restarts: int,
) -> int:
    """Run this command in a child process until it succeeds or cannot continue."""

    def tell(message: str) -> None:
        errors.print(message, highlight=False, soft_wrap=True)

    logging.getLogger("paceline").handlers = [logging.NullHandler()]  # the child logs warnings
    try:
        config = load()
    except PacelineError as error:
        fail(error)
    again = [*this_program(), *command]
    supervisor = Supervisor(Path(config.run_dir), restarts, tell)
    return asyncio.run(supervisor.run([*again, *once], again))


@dataclass
class _Running:
    """The run of a command, once its settings are known."""

    config: "RunConfig | SftConfig | None" = None


@contextmanager
def stopped_by_signals(once: str = "", supervised: bool = False) -> Iterator[_Running]:
    """Let Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 stop a run, report its errors, and set the exit code.

    The first signal lets the run finish its step (background.py); a second one ends the process.
    A signal that the supervisor forwards may be a copy of one that also came directly.
    `once`: options that a command that resumes the run does not have.
    """
    stopped_by: int | None = None
    senders: set[bool] = set()

    def interrupt(number: int, _: object) -> None:
        nonlocal stopped_by
        if number == signal.SIGHUP and senders:
            return  # the kernel and the shell both send it when a terminal is closed
        forwarded = number == FORWARDED
        if forwarded in senders:
            console.show_cursor()
            os._exit(128 + signal.SIGTERM if forwarded else 128 + number)  # workers end with it
        senders.add(forwarded)
        if stopped_by is None:
            stopped_by = signal.SIGTERM if forwarded else number
            raise KeyboardInterrupt

    # A shell starts background jobs with SIGINT ignored; so both signals get a handler.
    handled = (*STOPPING, FORWARDED) if supervised else STOPPING
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        handled = (*handled, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in handled}
    run = _Running()
    try:
        yield run
    except PacelineError as error:
        fail(error)
    except KeyboardInterrupt:
        how = _how_to_resume(run.config, once)
        console.print(f"\nstopped{how}", highlight=False, soft_wrap=True)
        raise typer.Exit(128 + (stopped_by or signal.SIGINT)) from None
    finally:
        console.show_cursor()  # a run that was given up has not closed its live panel
        for number, handler in before.items():
            signal.signal(number, handler)


def _how_to_resume(config: "RunConfig | SftConfig | None", once: str) -> str:
    """Return what the same command would do next, to follow the word "stopped"."""
    if config is None:
        return ""
    step = saved_step(Path(config.run_dir))
    if not step:
        return (
            f" before the first checkpoint (save_every = {config.save_every}); "
            "the same command starts over"
        )
    without = f"without {once} " if once else ""
    return f"; the same command {without}continues from step {step}"
