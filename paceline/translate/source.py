"""What a translation reads and what it returns."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

ACTOR = "actor_rollout_ref.actor."
MODEL = "actor_rollout_ref.model."
ROLLOUT = "actor_rollout_ref.rollout."
PROGRAM = "program"  # the module that a command starts, for example verl.trainer.main_ppo


@dataclass(slots=True)
class Translation:
    settings: dict[str, Any] = field(default_factory=dict)
    """Paceline's settings by dotted name."""
    notes: dict[str, str] = field(default_factory=dict)
    """Why a setting is ignored or differs, by its foreign name. Training may continue."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why a setting that changes what is learned has no counterpart, by its foreign name."""


class Source:
    """Foreign settings by dotted name, with Paceline's settings that they are added to."""

    def __init__(
        self, values: Mapping[str, Any], base: Mapping[str, Any], translation: Translation
    ) -> None:
        self._values, self._base = values, base
        self._translation = translation

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first name that is set; None counts as unset."""
        found = (self._values[name] for name in names if self._values.get(name) is not None)
        return next(found, default)

    def number(self, *names: str, default: float = 0) -> float:
        """Return the value of the first name that is set; reject it if it is not a number."""
        value = self.get(*names)
        if _is_number(value):
            return value
        if value is not None:
            given = next(name for name in names if self._values.get(name) is not None)
            self.reject(given, "expected a number")
        return default

    def any(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._values)

    def base(self, setting: str, default: Any = None) -> Any:
        """Return the value of one of Paceline's settings in the recipe."""
        return self._base.get(setting, default)

    def base_number(self, setting: str, default: float) -> float:
        """Return a number of the recipe; a wrong one is reported when all settings are checked."""
        value = self._base.get(setting)
        return value if _is_number(value) else default

    def note(self, name: str, text: str) -> None:
        """Say what differs in Paceline, if the setting is given."""
        if name in self._values:
            self._translation.notes[name] = text

    def reject(self, name: str, reason: str) -> None:
        self._translation.missing[name] = reason


def _is_number(value: Any) -> TypeGuard[int | float]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) < math.inf  # NaN is not below it
