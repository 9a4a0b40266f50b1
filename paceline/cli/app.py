"""The `paceline` application: its console, and how warnings and errors are shown."""

import errno
import logging
import sys
from typing import Annotated, Any, NoReturn

import typer
from rich.text import Text

from paceline.errors import CheckpointError, PacelineError
from paceline.observe.console import RunConsole, discard_output
from paceline.printable import redacted


class _App(typer.Typer):
    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run a command. A file or an output that cannot be used ends it with a sentence."""
        try:
            return super().__call__(*args, **options)
        except OSError as error:
            problem = _problem(error)
        except PacelineError as error:
            problem = error
        _print_error(problem)
        discard_output()
        sys.exit(problem.exit_code)


def _problem(error: OSError) -> PacelineError:
    """Return what to tell about a file, or about the output; raise another error again."""
    if error.filename is not None:
        return CheckpointError(
            f"{error.filename}: {error.strerror}; check this path, its rights and its disk"
        )
    if error.errno in (errno.ENOSPC, errno.EIO):  # of the help, which typer prints
        return PacelineError(f"the output cannot be written: {error.strerror}")
    raise error


app = _App(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = RunConsole(continues=False)
errors = RunConsole(stderr=True)
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="key=value, for example steps=50 schedule.max_staleness=4", show_default=False
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from paceline.version import describe

        for line in describe():
            console.print(line, highlight=False, soft_wrap=True)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print version, commit and backends.",
        ),
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for language models."""


class _Warnings(logging.Handler):
    """Handler that shows Paceline's warnings to the user; tracebacks are only in the log files."""

    def __init__(self, output: RunConsole) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        if not record.exc_info:  # the error that ends the run is printed in any case
            warn(record.getMessage(), self._output)


def warn(message: str, output: RunConsole = console) -> None:
    output.print(Text("warning:", "yellow"), redacted(message), highlight=False, soft_wrap=True)


def log_to_console(as_json: bool = False) -> None:
    """Show warnings from here on. `as_json`: the output is JSON, so they go to stderr."""
    logging.getLogger("paceline").handlers = [_Warnings(errors if as_json else console)]


def fail(error: PacelineError) -> NoReturn:
    """Print the error without a traceback and exit with its exit code."""
    _print_error(error)
    raise typer.Exit(error.exit_code)


def _print_error(error: PacelineError) -> None:
    message = "\n".join([str(error), *getattr(error, "__notes__", [])])
    errors.print(Text("error:", "bold red"), message, highlight=False, soft_wrap=True)
