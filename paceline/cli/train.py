"""The commands that run a model: `train` and `evaluate`."""

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.app import app, console, fail, log_to_console
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.config import RunConfig


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
    from paceline.job import Job
    from paceline.observe.terminal import Terminal

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
        log_to_console()
        Job(config).train(fresh, Terminal(config, console)).result()
    except PacelineError as error:
        fail(error)
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
        log_to_console()
        with console.status("loading torch and transformers …") as status, ExitStack() as stack:
            from paceline.job import Job
            from paceline.observe.terminal import DeviceLines, ModelProgress

            preparing = None
            if not as_json:
                stack.enter_context(DeviceLines(console))
                preparing = stack.enter_context(ModelProgress(console, config.model, status))

            def show_progress(done: int, total: int) -> None:
                status.update(f"{done} of {total} prompts completed …")
                if not console.is_terminal and not as_json and done % max(1, total // 10) == 0:
                    console.print(f"{done} of {total} prompts completed", highlight=False)

            found = Job(config).evaluate(samples, show_progress, preparing).result()
    except PacelineError as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    if as_json:
        console.print_json(data=found)
    else:
        for name, value in found.items():
            console.print(f"{name:20} {value:.4g}", highlight=False)


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
