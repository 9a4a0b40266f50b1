"""One folder holds everything a run needs to go on: weights, optimizer, versions, cursor, ledger. Safetensors and JSON only.

A checkpoint is written under a temporary name, checksummed, synced and renamed: it is there whole or not at all. The
newest one that verifies is the one a run continues from; older ones go only after the new one has been verified.
"""

import asyncio
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SCHEMA = 1


async def save_checkpoint(
    root: Path,
    step: int,
    state: dict[str, Any],
    write: Callable[[Path], Awaitable[None]],
    keep: int,
) -> Path:
    """`write` puts the roles' files into the folder it is given; `state` becomes state.json. Of the whole ones `keep` stay."""
    final = root / f"step_{step:08d}"
    temporary = root / f".{final.name}.tmp"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left_behind in root.glob(".step_*.tmp"):  # by a run that was killed
            shutil.rmtree(left_behind, ignore_errors=True)
        temporary.mkdir()
        await write(temporary)
        await asyncio.to_thread(
            _finish, temporary, final, step, state
        )  # reading gigabytes again takes its time
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {root}: {error}; the same command continues from the one before"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    await asyncio.to_thread(_prune, root, final, keep)
    return final


def _finish(temporary: Path, final: Path, step: int, state: dict[str, Any]) -> None:
    (temporary / "state.json").write_text(json.dumps(state, indent=1))
    (temporary / MANIFEST).write_text(
        json.dumps({"schema": SCHEMA, "step": step, "files": _digest(temporary)}, indent=1)
    )
    for path in [*temporary.rglob("*"), temporary]:
        _fsync(path)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    _fsync(final.parent)
    verify_checkpoint(final)


def _prune(root: Path, newest: Path, keep: int) -> None:
    """Older ones go once `keep` whole ones are there. A damaged one counts for nothing, and neither does one that a continued run found
    damaged and has not reached again."""
    kept = 1
    for folder in reversed([folder for folder in _folders(root) if folder < newest]):
        if kept >= keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            kept += _is_whole(folder)


def latest_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint that is whole; damaged ones are named and passed over."""
    for folder in reversed(_folders(root)):
        try:
            verify_checkpoint(folder)
            return folder
        except CheckpointError as error:
            log.warning("%s; trying the one before", error)
    return None


def read_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


def verify_checkpoint(folder: Path) -> None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        expected: dict[str, str] = manifest["files"]
        schema = manifest["schema"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"checkpoint {folder} has no readable {MANIFEST}: {error}") from error
    if schema != SCHEMA:
        raise CheckpointError(
            f"checkpoint {folder} has schema {schema}; this version of Paceline reads schema {SCHEMA}"
        )
    found = _digest(folder)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            what = (
                "is missing"
                if name not in found
                else "does not belong there"
                if name not in expected
                else "is damaged"
            )
            raise CheckpointError(f"checkpoint {folder}: file {name} {what}")


def _is_whole(folder: Path) -> bool:
    try:
        verify_checkpoint(folder)
    except CheckpointError:
        return False
    return True


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("step_*") if path.is_dir())


def _digest(folder: Path) -> dict[str, str]:
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise CheckpointError(
                f"checkpoint {folder}: {path.name} is a link; only plain files are read"
            )
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as file:
                files[str(path.relative_to(folder))] = hashlib.file_digest(
                    file, "sha256"
                ).hexdigest()
    return files


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
