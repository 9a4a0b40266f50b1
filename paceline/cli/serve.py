"""The command `serve`."""

import asyncio
import importlib.util
import signal
from typing import Annotated

import typer

from paceline.cli.app import Overrides, app, console, fail, log_to_console
from paceline.errors import ConfigError, PacelineError


@app.command()
def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="Model directory, Hugging Face model ID, or run directory (its last checkpoint)",
            show_default=False,
        ),
    ],
    settings: Overrides = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1. 0: any free one.")
    ] = 0,
) -> None:
    """Serve a model to OpenAI clients on this machine."""
    try:
        if importlib.util.find_spec("aiohttp") is None:
            raise ConfigError(
                "the package aiohttp is not installed; run pip install 'paceline[agents]'"
            )
        log_to_console()
        with console.status("loading torch and transformers …") as status:
            from paceline.serving import serve as serve_model
            from paceline.serving import serving_config

            def ready(url: str, key: str) -> None:
                status.stop()
                for line in (f"OPENAI_BASE_URL={url}", f"OPENAI_API_KEY={key}"):
                    console.print(f"export {line}", highlight=False, soft_wrap=True)
                console.print("(Ctrl-C ends)", highlight=False)

            asyncio.run(serve_model(serving_config(model, settings or ()), port, ready))
    except PacelineError as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
