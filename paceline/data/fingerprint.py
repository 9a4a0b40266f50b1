"""Text of a row that is the same in every process, for the hash of a dataset."""

import json
import re
from collections.abc import Mapping, Set
from typing import Any

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def stable_text(value: Any) -> str:
    """Return a value as JSON, also if it contains sets, objects or keys that JSON lacks."""
    try:
        return json.dumps(value, sort_keys=True, default=_same_text)
    except TypeError:  # a dict with keys that are not text, or of several types
        return json.dumps(_text_keys(value), sort_keys=True, default=_same_text)


def _same_text(value: Any) -> Any:
    """Return a value that JSON lacks as one that is the same in every process."""
    if isinstance(value, Set):  # its order depends on the process
        return sorted(stable_text(item) for item in value)
    return ADDRESS.sub("", str(value))  # of an object or a function


def _text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {stable_text(key): _text_keys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_text_keys(item) for item in value]
    return value
