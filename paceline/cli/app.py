"""The `paceline` application: its console, and how warnings and errors are shown."""

import logging
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from paceline import __version__
from paceline.errors import PacelineError
from paceline.observe.console import RunConsole

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = RunConsole()
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="key=value, for example steps=50 schedule.max_staleness=4", show_default=False
    ),
]


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


class _Warnings(logging.Handler):
    """Handler that shows Paceline's warnings to the user; tracebacks are only in the log files."""

    def emit(self, record: logging.LogRecord) -> None:
        if not record.exc_info:  # the error that ends the run is printed in any case
            warn(record.getMessage())


def warn(message: str) -> None:
    console.print(f"[yellow]warning:[/] {escape(message)}", highlight=False, soft_wrap=True)


def log_to_console() -> None:
    logging.getLogger("paceline").handlers = [_Warnings(logging.WARNING)]


def fail(error: PacelineError) -> NoReturn:
    """Print the error without a traceback and exit with its exit code."""
    message = "\n".join([str(error), *getattr(error, "__notes__", [])])
    Console(stderr=True).print(
        "[bold red]error:[/]", escape(message), highlight=False, soft_wrap=True
    )
    raise typer.Exit(error.exit_code)
