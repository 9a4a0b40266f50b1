"""The command `model get`."""

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.app import app, console, fail, log_to_console
from paceline.errors import PacelineError

models = typer.Typer(
    no_args_is_help=True, help="Convert GGUF files and download models, once for all runs."
)
app.add_typer(models, name="model")


@models.callback()
def main() -> None:
    """Convert GGUF files and download models, once for all runs."""


@models.command()
def get(
    name: Annotated[
        str, typer.Argument(help="GGUF file or Hugging Face model ID", show_default=False)
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(help="Directory to write. Default: in the cache.", show_default=False),
    ] = None,
) -> None:
    """Write a model as a Hugging Face directory, which `model`, transformers and vLLM read.

    A run converts a GGUF file by itself; a directory in the cache is used by later runs.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    log_to_console()
    try:
        from paceline.model.get import get_model
        from paceline.observe.terminal import ModelProgress

        with (
            console.status("reading the model …") as status,
            ModelProgress(console, name, status) as progress,
        ):
            found = get_model(name, folder, progress)
    except PacelineError as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    size = sum(file.stat().st_size for file in found.iterdir() if file.is_file())
    console.print(f"{name}: {found} ({size / 1e9:,.1f} GB)", highlight=False, soft_wrap=True)
