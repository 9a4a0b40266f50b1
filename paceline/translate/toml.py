"""A recipe as TOML text: settings by section, with comments about what was not translated."""

import json
from collections.abc import Mapping
from typing import Any

from paceline.translate.source import Translation


def recipe_text(translation: Translation, values: Mapping[str, Any], origin: str) -> str:
    """Return the recipe of a translation of `values`, with what differs as comments at the end."""
    sections: dict[str, list[str]] = {"": []}
    for name, value in translation.settings.items():
        section, _, last = name.rpartition(".")
        if value is not None:
            sections.setdefault(section, []).append(f"{last} = {toml_value(value)}")
    lines = [f"# Translated from {origin} by `paceline translate`."]
    for section, settings in sections.items():
        lines += [*(["", f"[{section}]"] if section else []), *settings]
    for title, found in remarks(translation, values):
        lines += ["", f"# {title}:", *(f"#   {line}" for line in found)]
    return "\n".join(lines) + "\n"


def remarks(translation: Translation, values: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return what has no counterpart and what differs, as titles with a line per setting."""
    parts = (
        ("No counterpart, although it changes what is learned", translation.missing),
        ("Ignored, or different", translation.notes),
    )
    return [
        (
            title,
            [f"{name} = {_json(values.get(name))}: {why}" for name, why in found.items()],
        )
        for title, found in parts
        if found
    ]


def _json(value: Any) -> str:
    return json.dumps(value, default=str)  # YAML reads some text as a date


def toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
