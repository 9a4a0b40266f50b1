"""Reads manifest.json and state.json of a checkpoint, whatever is in them. Every problem is a
CheckpointError that names the file."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError
from paceline.queue.ledger import LedgerState

MANIFEST, STATE = "manifest.json", "state.json"
STATE_TYPES = {"metrics_length": int, "config": dict, "source": dict}
LEDGER_TYPES = {
    "next_seq": int,
    "outstanding": list,
    "trained": int,
    "dropped": dict,
    "length": int,
}
# What code raises that expects another content.
UNEXPECTED = (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError)


def read_manifest(folder: Path) -> tuple[Any, dict[str, str]]:
    """Return the schema and the checksum of each file."""
    manifest = _read(folder, MANIFEST)
    files = manifest.get("files")
    if "schema" not in manifest or not isinstance(files, dict):
        raise _damaged(folder, MANIFEST, "it has no schema or no files")
    if not all(isinstance(digest, str) for digest in files.values()):
        raise _damaged(folder, MANIFEST, "a checksum is not text")
    return manifest["schema"], files


def read_state(folder: Path) -> dict[str, Any]:
    """Return state.json, which has at least the step."""
    state = _read(folder, STATE)
    with reading_state(folder):
        _check_types(state, {"step": int})
    return state


def read_run_state(folder: Path) -> dict[str, Any]:
    """Return everything of a run that is neither weights nor optimizer state."""
    state = read_state(folder)
    with reading_state(folder):
        _check_types(state, STATE_TYPES)
        if ledger := state.get("ledger"):  # supervised runs have none
            _check_types(ledger, LEDGER_TYPES)
            _check_types(dict(enumerate(ledger["outstanding"])), int)
            _check_types(ledger["dropped"], int)
            LedgerState.from_json(ledger)
    return state


@contextmanager
def reading_state(folder: Path) -> Iterator[None]:
    """Turn what unexpected content raises into a CheckpointError."""
    try:
        yield
    except UNEXPECTED as error:
        raise _damaged(folder, STATE, f"{type(error).__name__}: {error}") from error


def _check_types(values: Any, expected: Mapping[str, type] | type) -> None:
    types = expected if isinstance(expected, Mapping) else dict.fromkeys(values, expected)
    for name, kind in types.items():
        value: Any = values[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} is {type(value).__name__}; expected {kind.__name__}")
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{name} is {value}; expected 0 or more")


def _read(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if path.is_symlink() or not path.is_file():  # a pipe would never end
        raise _damaged(folder, name, "no regular file")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(folder, name, str(error)) from error
    if not isinstance(found, dict):
        raise _damaged(folder, name, f"it is {type(found).__name__}; expected an object")
    return found


def _damaged(folder: Path, name: str, problem: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder} has no readable {name}: {problem}")
