"""`paceline watch` and `paceline report`: the page of runs, live and as a file."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.app import app, console, fail
from paceline.errors import CheckpointError, PacelineError

RunDirs = Annotated[
    list[Path],
    typer.Argument(help="Run directories, for example runs/fully_async", show_default=False),
]


@app.command()
def watch(
    runs: RunDirs,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1. 0: any free one.")] = 0,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open the page in the default browser.")
    ] = False,
) -> None:
    """Serve a page with the charts and samples of runs, live or finished, side by side."""
    from paceline.page.server import PageServer

    try:
        server = PageServer(runs, port)
    except PacelineError as error:
        fail(error)
    console.print(f"{server.url}  (Ctrl-C ends)", highlight=False, soft_wrap=True)
    if open_browser:
        webbrowser.open(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


@app.command()
def report(
    runs: RunDirs,
    output: Annotated[
        Path | None,
        typer.Option(help="File. Default: report.html in the first run directory."),
    ] = None,
) -> None:
    """Write the page of runs as one HTML file of at most 3 MB that needs no network."""
    from paceline.auditor.audit import check_is_run
    from paceline.page.report import NAME, write_report

    target = output or runs[0] / NAME
    try:
        for run in filter(Path.is_dir, runs):
            check_is_run(run)  # its report would be empty
        write_report(runs, target)
    except OSError as error:
        fail(CheckpointError(f"{target} cannot be written: {error.strerror or error}"))
    except PacelineError as error:
        fail(error)
    console.print(f"{target}: {target.stat().st_size:,} bytes", highlight=False, soft_wrap=True)
