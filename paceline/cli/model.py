"""The commands `model get`, `model list` and `model clear`."""

import os
import signal
from functools import partial
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


@models.command("list")
def show() -> None:
    """List the converted GGUF files in the cache."""
    from paceline.model.cache import cache_folder
    from paceline.model.conversions import conversions

    found = list(conversions())
    for each in found:
        state = "" if each.is_used else " (unused: the file changed, moved or was not completed)"
        _print(f"{each.folder} ({each.size / 1e9:,.1f} GB) of {each.source or 'a file'}{state}")
    if not found:
        _print(f"no converted models in {cache_folder() / 'models'}")


@models.command()
def clear(
    everything: Annotated[
        bool, typer.Option("--all", help="Also remove those that later runs would use.")
    ] = False,
) -> None:
    """Remove converted GGUF files that no run would use: their file changed, moved or is gone."""
    from paceline.model.conversions import remove_conversions

    try:
        removed = remove_conversions(everything)
    except PacelineError as error:
        fail(error)
    for each, _ in removed:
        _print(f"removed {each.folder}")
    _print(f"{sum(size for _, size in removed) / 1e9:,.1f} GB removed")


def _print(line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


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
            ModelProgress(console, status) as progress,
        ):
            found = get_model(name, folder, partial(progress, name))
    except PacelineError as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    size = sum(file.stat().st_size for file in found.iterdir() if file.is_file())
    console.print(f"{name}: {found} ({size / 1e9:,.1f} GB)", highlight=False, soft_wrap=True)
