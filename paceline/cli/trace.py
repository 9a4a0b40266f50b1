"""The command that converts the trace of a run."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.app import app, console, fail
from paceline.errors import PacelineError


@app.command()
def trace(
    run: Annotated[
        Path, typer.Argument(help="Run directory, for example runs/fully_async", show_default=False)
    ],
    steps: Annotated[
        str, typer.Option(help="Train steps, for example 10:12. Default: all.", show_default=False)
    ] = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path(
        "trace.json"
    ),
) -> None:
    """Write what workers and groups did to a file for ui.perfetto.dev (needs trace=true)."""
    from paceline.observe.trace import write_trace

    try:
        events = write_trace(run, output, steps)
    except PacelineError as error:
        fail(error)
    console.print(
        f"{events} events in {output}; open it at https://ui.perfetto.dev",
        highlight=False,
        soft_wrap=True,
    )
