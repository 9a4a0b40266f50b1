"""Reading settings: recipe, values and `key=value` overrides; translates settings of verl."""

import functools
import logging
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, permutations
from pathlib import Path
from shlex import quote
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from paceline.config.run import RunConfig
from paceline.errors import ConfigError
from paceline.hints import explain
from paceline.recipe import find_recipe, read_recipe
from paceline.settings import SettingsT, all_names, find_section, walk_settings
from paceline.translate.hydra import flatten, read_value
from paceline.translate.verl import is_foreign, translate

log = logging.getLogger(__name__)


# Settings that exclude each other: one on the command line replaces the others in the recipe.
ALTERNATIVES = (
    ("data.task", "data.path", "data.source"),
    ("evaluation.task", "evaluation.path", "evaluation.source"),
    ("reward.function", "reward.model"),
    ("validation.path", "validation.rows"),
)


def load_config(
    recipe: str | Path | None = None,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Read a recipe, then apply `values` and `key=value` overrides, in this order.

    `values` are Python objects by name: nested mappings or dotted names. Raise ConfigError with a
    line per mistake.
    """
    own, foreign = _split(recipe_settings(recipe))
    if any(key == "rows_per_step" for key, _ in own):
        raise ConfigError(
            f"recipe {recipe} is for supervised fine-tuning; run it with: paceline sft "
            f"{quote(str(recipe))}"
        )
    given, more = _split(given_settings(overrides, values))
    # Settings of verl, as in its command, complete each other wherever they are given.
    complete = recipe is None or bool(foreign)
    translated = _translate(foreign | more, dict(own + given), complete)
    return combine(RunConfig, (own, translated, given), recipe)


def recipe_settings(recipe: str | Path | None) -> list[tuple[str, Any]]:
    """Return the settings of a recipe by dotted name; the run directory has its name by default."""
    if recipe is None:
        return []
    path = find_recipe(recipe)
    return [("run_dir", f"runs/{path.stem}"), *flatten(read_recipe(path), tables=_tables())]


def given_settings(
    overrides: Sequence[str], values: Mapping[str, Any] | None
) -> list[tuple[str, Any]]:
    """Return by dotted name what the caller sets: `values`, then `key=value` overrides.

    A table, as in `train={dtype="bfloat16"}`, sets only the settings that it contains. A table
    that is the value of a setting, as in `rollout.environment_args={level=3}`, replaces the value.
    """
    if isinstance(overrides, str | Mapping):
        raise ConfigError(
            f"overrides is {type(overrides).__name__}; expected a list, for example ['steps=3']. "
            "Pass a dict of settings as values={'steps': 3}"
        )
    given = (values or {}, *(dict([_parse(override)]) for override in overrides))
    return [*chain.from_iterable(flatten(each, tables=_tables()) for each in given)]


def combine(
    model: type[SettingsT],
    layers: Iterable[Sequence[tuple[str, Any]]],
    recipe: str | Path | None,
) -> SettingsT:
    """Return the checked settings; each layer replaces settings of the layers before it.

    Raise ConfigError with a line per mistake.
    """
    values: dict[str, Any] = {}
    for settings in layers:
        for key, value in settings:
            _apply(values, key, value, model)
        _drop_alternatives(values, {key for key, value in settings if value is not None})
    try:
        return model.model_validate(values)
    except ValidationError as error:
        where = f" in {recipe}" if recipe is not None else ""
        lines = [line for problem in error.errors() for line in explain(problem, model)]
        raise ConfigError(
            f"{len(lines)} wrong setting{'s' if len(lines) > 1 else ''}{where}:\n"
            + "\n".join(f"  {x}" for x in lines)
        ) from None


def split_settings(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return Paceline's settings and verl's, both by dotted name."""
    own, foreign = _split(flatten(values))
    return dict(own), foreign


def _split(settings: Iterable[tuple[str, Any]]) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    own: list[tuple[str, Any]] = []
    foreign: dict[str, Any] = {}
    for key, value in settings:
        if _is_foreign(key, value):
            foreign[key] = value
        else:
            own.append((key, value))
    return own, foreign


def is_setting(key: str) -> bool:
    """Return whether a dotted name is one of Paceline's settings or sections."""
    return key in _own_names()


def _is_foreign(key: str, value: Any) -> bool:
    return not is_setting(key) and is_foreign(key, value)


@functools.cache
def _own_names() -> frozenset[str]:
    """Return the dotted names of all settings and sections."""
    names = set()
    for setting, field in walk_settings(RunConfig):
        *sections, _ = setting.split(".")
        names |= {".".join([*sections, name]) for name in all_names(setting, field)}
        names |= {".".join(sections[:end]) for end in range(1, len(sections) + 1)}
    return frozenset(names)


@functools.cache
def _tables() -> frozenset[str]:
    """Return the dotted names of settings whose value is a dict."""
    return frozenset(
        setting
        for setting, field in walk_settings(RunConfig)
        if get_origin(field.annotation) is dict
    )


def _translate(
    foreign: Mapping[str, Any], base: Mapping[str, Any], complete: bool
) -> list[tuple[str, Any]]:
    """Translate verl's settings. Raise ConfigError if one has no counterpart."""
    translation = translate(foreign, base, complete)
    if translation.missing:
        raise ConfigError(
            f"{len(translation.missing)} of verl's settings cannot be used:\n"
            + "\n".join(f"  {name}: {reason}" for name, reason in translation.missing.items())
            + "\nRemove them. `paceline translate` with the same file or settings writes a recipe "
            "and lists everything that differs"
        )
    if translation.notes:
        log.warning(
            "ignored or changed settings of verl: %s (`paceline translate` gives the reasons)",
            ", ".join(translation.notes),
        )
    return list(translation.settings.items())


def _drop_alternatives(values: dict[str, Any], given: set[str]) -> None:
    """Remove from a recipe what excludes a given setting."""
    for names in ALTERNATIVES:
        for chosen, other in permutations(names, 2):
            section, name = other.split(".")
            if chosen in given and other not in given and isinstance(values[section], dict):
                values[section].pop(name, None)


def _parse(override: str) -> tuple[str, Any]:
    """Split `key=value` and read the value as TOML does, or as Hydra does for a key of verl."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(
            f"{override!r} is not a setting; write key=value, for example schedule.max_staleness=2"
        )
    if _is_foreign(key.lstrip("+"), text):
        return key.lstrip("+"), read_value(text)
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # not TOML, too many digits, nested too deeply
        return key, text  # a bare word is a string: data.task=sort:5


def _apply(values: dict[str, Any], key: str, value: Any, model: type[BaseModel]) -> None:
    """Set a dotted name in nested dicts, under whatever name of the setting was set before."""
    *sections, name = key.split(".")
    target = values
    for section in sections:
        if target.get(section) is None:  # also an empty section of YAML
            target[section] = {}
        target = target[section]
        if not isinstance(target, dict):
            raise ConfigError(f"{key}={value}: {section!r} is a single setting, not a section")
    is_section = find_section(model, [*sections, name]) != find_section(model, sections)
    if is_section and isinstance(value, dict) and isinstance(target.get(name), dict):
        return  # a table with settings arrives as dotted names, and an empty one changes nothing
    for alias in _aliases(sections, name, model):
        target.pop(alias, None)
    target[name] = value


def _aliases(sections: Sequence[str], name: str, model: type[BaseModel]) -> list[str]:
    """Return all names of a setting, so that the command line replaces any of them."""
    for field_name, field in find_section(model, sections).model_fields.items():
        if name in (names := all_names(field_name, field)):
            return names
    return []
