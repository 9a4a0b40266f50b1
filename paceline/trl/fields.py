"""Fields of GRPOConfig as those of a dataclass.

TrlParser and transformers' HfArgumentParser read the fields of dataclasses from a command line or a
YAML file, and scripts derive their own configurations with `@dataclass`.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field, make_dataclass
from typing import Any

# Fields whose type does not follow from TRL's default, or from that of Paceline.
TYPES: dict[str, Any] = {"gradient_checkpointing": bool, "reward_weights": list[float]}
WORDS = {"none": None, "true": True, "false": False}


def value(text: str) -> Any:
    """Return what an argument of a command line means: a number, JSON, a constant or text."""
    if text.lower() in WORDS and text != "none":  # which is a value of some fields
        return WORDS[text.lower()]
    for read in (json.loads, float):
        with suppress(ValueError):
            return read(text)
    return text


def dataclass_of(defaults: Mapping[str, Any]) -> Any:
    """Return a dataclass with these fields, for a subclass that creates its objects."""
    fields = [(name, _type(name, default), _field(default)) for name, default in defaults.items()]
    return make_dataclass("Fields", fields, init=False, repr=False, eq=False)


def _type(name: str, default: Any) -> Any:
    return TYPES.get(name, bool if isinstance(default, bool) else value)


def _field(default: Any) -> Any:
    return field(default_factory=list) if default == [] else field(default=default)
