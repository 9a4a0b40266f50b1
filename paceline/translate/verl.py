"""The translation of verl's settings to Paceline's, by the table, for all commands."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.algo.presets import PRESETS
from paceline.algo.settings import CUSTOM, EFFECTIVE_WITH, AlgorithmSettings
from paceline.translate.source import Source, Translation
from paceline.translate.table import (
    DEFAULTS,
    GROUPS,
    OFF,
    OWN,
    SECTIONS,
    TABLE,
    Entry,
    Ignored,
    Missing,
    Part,
    Same,
    find_entry,
)


def is_foreign(name: str, value: Any) -> bool:
    """Return whether a name that is not one of Paceline's belongs to verl."""
    section = name.split(".")[0]
    if name == section:  # a section of verl may be empty
        return name in TABLE or (name in SECTIONS and value in OFF)
    return section in SECTIONS or name.endswith("._target_") or find_entry(name) is not None


def translate(
    values: Mapping[str, Any], base: Mapping[str, Any], complete: bool = False
) -> Translation:
    """Translate verl's settings, by dotted name, to be added to the settings `base`.

    With `complete`, they are a whole configuration: verl's defaults are added.
    """
    given = {name: _typed(value) for name, value in values.items()}
    values = dict(_resolved(given))
    translation = Translation()
    for name, value in given.items():
        if name in values and values[name] is not None:
            continue
        if isinstance(find_entry(name), Same | Part | Missing):
            if "${" in str(value):
                translation.notes[name] = "refers to a value that is not given; the default applies"
            elif COMMAND in str(value):
                translation.notes[name] = "contains a shell command; the default applies"
    if complete and values.get("algorithm.adv_estimator") is not None:
        values = DEFAULTS | values
        translation.settings |= OWN
    source = Source(values, base, translation)
    for name, value in values.items():
        entry = find_entry(name)
        if _is_off(entry, value) and not isinstance(entry, Same | Part):
            continue
        if entry is None:
            translation.missing[name] = "unknown"
        elif isinstance(entry, Ignored):
            translation.notes[name] = entry.reason
        elif isinstance(entry, Missing):
            translation.missing[name] = entry.reason
        elif isinstance(entry, Same) and value is not None:
            translation.settings[entry.setting] = entry.convert(value)
            if entry.note:
                translation.notes[name] = entry.note
    for group in GROUPS:
        translation.settings |= group(source)
    drop_without_effect(translation, base)
    return translation


def _is_off(entry: Entry | None, value: Any) -> bool:
    """Return whether a value changes nothing. False does where True is the usual value."""
    usual = entry.off if isinstance(entry, Missing) else ()
    return value in usual or (value in OFF and not (value is False and True in usual))


def _typed(value: Any) -> Any:
    """Return numbers as numbers, as YAML reads 1e-6 as text; `???` is unset."""
    if value == "???":
        return None
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


COMMAND = "$("  # of a shell, which is not run
REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^{}]*))?\}")


def _resolved(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values with `${a.b}` replaced; leave out what cannot be resolved."""

    def text(match: re.Match[str]) -> str:
        found = values.get(match[1], match[2])
        return match[0] if found is None else str(found)

    for name, value in values.items():
        found = value
        for _ in range(8):  # a reference may lead to another
            if match := REFERENCE.fullmatch(str(found)):
                found = values.get(match[1], match[2])
            elif isinstance(found, str) and "${" in found:  # references inside of a path
                found = REFERENCE.sub(text, found)
            else:
                break
        open_ends = re.search(r"\$\{.*\}", str(found)) or COMMAND in str(found)
        if not open_ends and not name.endswith("_target_"):
            yield name, found


def drop_without_effect(translation: Translation, base: Mapping[str, Any]) -> None:
    """Drop settings that Paceline would reject because the algorithm does not use them."""
    settings = translation.settings
    given = {**base, **settings}
    preset = PRESETS.get(str(given.get("algorithm.name", "grpo")), {})
    for name, other, effective in EFFECTIVE_WITH:
        default = preset.get(other, AlgorithmSettings.model_fields[other].default)
        value = given.get(f"algorithm.{other}", default)
        custom = not isinstance(value, str) or ":" in value  # a function of the user
        unused = value not in effective and not (custom and CUSTOM in effective)
        if f"algorithm.{name}" in settings and unused:
            del settings[f"algorithm.{name}"]
