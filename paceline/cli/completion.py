"""What a shell completes: recipes, and the names and some values of settings."""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Literal, get_args, get_origin

from paceline.settings import Settings, walk_settings


def complete_recipe(incomplete: str) -> list[str]:
    """Return built-in recipes, and recipe files and directories, that begin with the text."""
    from paceline.recipe import YAML, built_in_recipes

    names = [name for name in built_in_recipes() if name.startswith(incomplete)]
    try:
        folder = Path(incomplete).expanduser()
        folder = folder if incomplete.endswith("/") else folder.parent
        entries = sorted(folder.iterdir())
    except (OSError, RuntimeError):  # also: ~name of a user that does not exist
        return names
    start = incomplete[: incomplete.rfind("/") + 1]
    for path in entries:
        text = f"{start}{path.name}"
        if not text.startswith(incomplete) or path.name.startswith("."):
            continue
        if path.is_dir():
            names.append(f"{text}/")
        elif path.suffix in (".toml", *YAML):
            names.append(text)
    return names


def complete_setting(incomplete: str) -> list[str]:
    """Return settings of `paceline train` that begin with the text, as `name=`, or their values."""
    from paceline.config import RunConfig

    return list(_settings(incomplete, RunConfig))


def complete_sft_setting(incomplete: str) -> list[str]:
    """Return settings of `paceline sft` that begin with the text."""
    from paceline.supervised.config import SftConfig

    return list(_settings(incomplete, SftConfig))


def _settings(incomplete: str, model: type[Settings]) -> Iterator[str]:
    known, equals, _ = incomplete.partition("=")
    for name, field in walk_settings(model):
        if not equals and name.startswith(incomplete):
            yield f"{name}="
        elif equals and name == known:
            for value in _values(field.annotation):
                if f"{name}={value}".startswith(incomplete):
                    yield f"{name}={value}"


def _values(annotation: object) -> tuple[str, ...]:
    if annotation is bool:
        return "true", "false"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return tuple(annotation)
    return tuple(map(str, get_args(annotation))) if get_origin(annotation) is Literal else ()
