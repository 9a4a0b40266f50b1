"""What a translation reads and what it returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
        value = self.get(*names)
        if isinstance(value, int | float):
            return value
        if value is not None:
            self.reject(next(n for n in names if n in self._values), "expected a number")
        return default

    def any(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._values)

    def base(self, setting: str, default: Any = None) -> Any:
        """Return the value of one of Paceline's settings in the recipe."""
        return self._base.get(setting, default)

    def note(self, name: str, text: str) -> None:
        """Say what differs in Paceline, if the setting is given."""
        if name in self._values:
            self._translation.notes[name] = text

    def reject(self, name: str, reason: str) -> None:
        self._translation.missing[name] = reason
