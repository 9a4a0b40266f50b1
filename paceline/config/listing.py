"""The list of settings that `paceline settings` shows."""

import json
from typing import Any, Literal, get_args, get_origin

from paceline.config.run import RunConfig
from paceline.hints import FOREIGN_NAMES
from paceline.settings import AUTO, Settings, is_automatic, walk_settings


def describe_settings(
    under: str = "", model: type[Settings] = RunConfig
) -> list[tuple[str, str, str]]:
    """Return name, default and description of every setting whose name starts with `under`.

    If there is none, return those whose name contains it, or that other libraries call so.
    """
    found: list[tuple[str, str, str]] = []
    for name, field in walk_settings(model):
        words = (field.description or "").split()
        if get_origin(field.annotation) is Literal:
            words.append(f"One of {', '.join(get_args(field.annotation))}.")
        written = (
            "required"
            if field.is_required()
            else _as_written(field.get_default(call_default_factory=True))
        )
        default = AUTO if is_automatic(field) else written
        found.append((name, default, " ".join(words)))
    starts = [row for row in found if row[0].startswith(under)]
    return starts or [row for row in found if under in row[0] or FOREIGN_NAMES.get(under) == row[0]]


def _as_written(value: Any) -> str:
    """Format a value as on the command line."""
    if value is None:
        return "unset"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {json.dumps(each)}" for key, each in value.items()) + "}"
    return json.dumps(value) if isinstance(value, bool | tuple) else str(value)
