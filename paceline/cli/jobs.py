"""The commands to a running job: its rollout workers, pause and resume."""

from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from paceline.cli.app import app, console, fail
from paceline.errors import PacelineError

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
    _print(f"added {', '.join(_send(run, 'add', count=count))}")


@workers.command("remove")
def remove_worker(
    run: RunDir,
    name: Annotated[str, typer.Argument(help="Name in `workers list`.", show_default=False)],
) -> None:
    """Remove a rollout worker. Other workers resume its unfinished completions."""
    _send(run, "remove", name=name)
    _print(f"removed {name}")


@app.command()
def pause(run: RunDir) -> None:
    """Pause generation in a running job until `paceline resume`."""
    _send(run, "pause")
    _print(f"{run} is paused; to continue: paceline resume {quote(str(run))}")


@app.command()
def resume(run: RunDir) -> None:
    """Resume a paused job."""
    _send(run, "resume")
    _print(f"{run} is running again")


def _print(line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)  # a command stays on one line


def _send(run: Path, command: str, **arguments: Any) -> Any:
    from paceline.control import send_command

    try:
        return send_command(run, command, **arguments)
    except PacelineError as error:
        fail(error)
