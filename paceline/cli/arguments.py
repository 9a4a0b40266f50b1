"""The arguments that several commands have: a recipe, and settings that override it."""

from collections.abc import Callable
from typing import Any

import typer

from paceline.cli.completion import complete_recipe, complete_setting


def recipe_argument(help: str) -> Any:
    return typer.Argument(help=help, show_default=False, autocompletion=complete_recipe)


def settings_argument(
    example: str = "", complete: Callable[[str], list[str]] = complete_setting
) -> Any:
    help = f"key=value, for example {example}" if example else "key=value"
    return typer.Argument(help=help, show_default=False, autocompletion=complete)
