"""Lookup of environments by name: built-in ones, adapters of other libraries, custom classes.

Imports no torch and runs no user code, so that a typo is reported before anything is loaded.
"""

import difflib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.code_search import CodeNotFound, find_code
from paceline.errors import ConfigError
from paceline.plugins import call_by_name, find_callable

_PACKAGE = "paceline.environment"
BUILT_IN = {
    "countdown": (
        f"{_PACKAGE}.built_in.countdown:Countdown",
        "make a number out of others; a wrong expression gets feedback and another try",
    ),
    "gsm8k": (
        f"{_PACKAGE}.built_in.gsm8k:Gsm8k",
        "math word problems of data.path, with a calculator",
    ),
    "guess": (
        f"{_PACKAGE}.built_in.guess:Guess",
        "a game: find a number with the hints higher and lower",
    ),
}
# Prefix of the name: class, package, description of what follows the colon. The extra of pip has
# the name of the prefix.
ADAPTERS = {
    "verifiers": (
        f"{_PACKAGE}.adapters.verifiers:Verifiers",
        "verifiers",
        "NAME: an installed environment of the library verifiers",
    ),
    "reasoning-gym": (
        f"{_PACKAGE}.adapters.reasoning_gym:ReasoningGym",
        "reasoning_gym",
        "TASK: a generated task of reasoning-gym with its scorer",
    ),
    "gymnasium": (
        f"{_PACKAGE}.adapters.gymnasium:Gymnasium",
        "gymnasium",
        "ID: an environment of Gymnasium, with observations and actions as text",
    ),
    "openenv": (
        f"{_PACKAGE}.adapters.openenv:OpenEnv",
        "openenv",
        "URL: a server of OpenEnv",
    ),
}


@dataclass(frozen=True, slots=True)
class Located:
    """Code of an environment, and the keyword arguments of its class."""

    code: str  # "module:Class" or "file.py:Class"
    arguments: Mapping[str, Any]

    def load(self) -> Callable[..., Any]:
        """Import the class. Raise ConfigError if it does not take the arguments."""
        found = find_callable(self.code)
        if self.arguments:
            _check_arguments(found, self.arguments)
        return found

    def rows(self, held_out: bool) -> Callable[[int], Iterable[Any]] | None:
        """Return a function of the seed that makes the rows, if the environment brings its own."""
        make = getattr(self.load(), "rows", None)
        if make is None:
            return None
        named = inspect.signature(make).parameters

        def rows(seed: int) -> Iterable[Any]:
            ours = {"seed": seed, "held_out": held_out}  # not for **arguments of another library
            ours = {name: value for name, value in ours.items() if name in named}
            found: Iterable[Any] = call_by_name(make, {**self.arguments, **ours})
            return found

        return rows


def locate(name: str, arguments: Mapping[str, Any] | None = None) -> Located:
    """Return the code that a name stands for. Raise ConfigError for an unknown name."""
    given = dict(arguments or {})
    if name in BUILT_IN:
        return Located(BUILT_IN[name][0], given)
    prefix, colon, rest = name.partition(":")
    if colon and prefix in ADAPTERS:
        if not rest:
            raise ConfigError(f"rollout.environment = {name!r}: expected {_form(prefix)}")
        return Located(ADAPTERS[prefix][0], {**given, "name": rest})
    if not colon:
        known = [*BUILT_IN, *(f"{prefix}:" for prefix in ADAPTERS)]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ConfigError(
            f"rollout.environment = {name!r} is not a built-in environment{hint} "
            f"Known: {', '.join(BUILT_IN)}, {', '.join(map(_form, ADAPTERS))}. "
            "Write a custom one as 'file.py:Class' or 'module:Class'."
        )
    return Located(name, given)


def check_name(name: str) -> None:
    """Raise ConfigError if there is no such environment, as far as that shows without importing."""
    located = locate(name)
    prefix = name.partition(":")[0]
    if prefix in ADAPTERS:
        package = ADAPTERS[prefix][1]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"rollout.environment = {name!r}: the package {package} is not installed; "
                f"run pip install 'paceline[{prefix}]'"
            )
    try:
        find_code(located.code)
    except CodeNotFound as problem:
        raise ConfigError(f"rollout.environment = {name!r}: {problem}") from None


def describe_environments() -> list[tuple[str, str]]:
    """Return name and description of every environment that can be selected by name."""
    adapters = [(_form(prefix), what.partition(": ")[2]) for prefix, (*_, what) in ADAPTERS.items()]
    return [*((name, what) for name, (_, what) in BUILT_IN.items()), *adapters]


def _form(prefix: str) -> str:
    return f"{prefix}:{ADAPTERS[prefix][2].partition(':')[0]}"


def _check_arguments(code: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    parameters = inspect.signature(code).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    if unknown := sorted(arguments.keys() - parameters.keys()):
        close = difflib.get_close_matches(unknown[0], parameters, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"rollout.environment_args has {unknown[0]!r}, which the environment does not take; "
            f"it takes {', '.join(parameters) or 'nothing'}{hint}"
        )
