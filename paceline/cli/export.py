"""The command `export`."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.app import app, console, fail, log_to_console
from paceline.errors import PacelineError


@app.command()
def export(
    run: Annotated[
        Path,
        typer.Argument(
            help="Run directory, for example runs/fully_async, or one of its checkpoints",
            show_default=False,
        ),
    ],
    step: Annotated[
        int | None, typer.Option(help="Train step. Default: the last saved.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    to: Annotated[
        Path | None,
        typer.Option(help="Directory to write. Default: RUN/export/step_N.", show_default=False),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Maximum size of a weight file, for example 500MB.")
    ] = "5GB",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the adapter of a LoRA run, for PEFT.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:
    """Write a trained model as a directory that transformers, vLLM and SGLang load."""
    log_to_console()
    try:
        from paceline.training.export import export_model

        with console.status("exporting …"):
            done = export_model(
                run,
                step,
                to=to,
                dtype=dtype,
                max_shard_size=max_shard_size,
                adapter=adapter,
                force=force,
            )
    except PacelineError as error:
        fail(error)
    files = "1 file" if done.files == 1 else f"{done.files} files"
    console.print(
        f"exported step {done.step} to {done.folder}: {files}, {done.bytes / 1e6:,.1f} MB",
        highlight=False,
        soft_wrap=True,
    )
