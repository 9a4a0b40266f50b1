"""Checkpoint directories: everything a run needs to resume, in safetensors and JSON files.

A checkpoint is written under a temporary name, fsynced, checksummed and renamed, so it is complete
or absent. A run resumes from the newest checkpoint that passes verification. Older checkpoints are
deleted only after the new one has its name. Writers of large files leave their checksums, so that
these are not read again.
"""

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Collection, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.checksum import CHECKSUM, checksums
from paceline.errors import CheckpointError
from paceline.training.lineage import Lineage
from paceline.training.manifest import MANIFEST as MANIFEST
from paceline.training.manifest import read_manifest
from paceline.training.manifest import read_state as read_state

log = logging.getLogger(__name__)

# A subdirectory of the actor's: transformers would load a directory with an adapter_config.json as
# an adapter.
ADAPTER = "adapter"
SCHEMA = 3
SCHEMAS = (2, SCHEMA)  # that can be read: with 2, checksums are SHA-256 of whole files
MAX_THREADS = 16

Stamps = dict[str, tuple[int, int, int]]
# Checkpoints that were whole, with the stamps of their files then: these are not read again.
_VERIFIED: dict[Path, Stamps] = {}


async def save_checkpoint(
    root: Path,
    step: int,
    state: dict[str, Any],
    write: Callable[[Path], Awaitable[None]],
    keep: int,
    protected: Callable[[], Collection[int]] = tuple,
) -> Path:
    """Save a checkpoint, then delete old ones so that `keep` complete checkpoints remain.

    `protected()` returns steps whose checkpoints are kept in addition. `write` writes the files of
    all roles into the given directory; `state` becomes state.json.
    """
    final = root / _name(step)
    temporary = root / f".{final.name}.tmp"
    text = json.dumps(state, indent=1)  # now: what it describes may change while files are written
    try:
        root.mkdir(exist_ok=True)
        remove_leftovers(root)
        temporary.mkdir()
        await write(temporary)
        # A thread, because it waits for the disk.
        await _to_its_end(_finish, temporary, final, step, text)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint of step {step} to {root}: {error}. Fix the cause and run "
            "the same command again to resume from the previous checkpoint"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    names = {_name(number) for number in protected()}
    await _to_its_end(_prune, root, final, keep, names)
    return final


def remove_leftovers(root: Path) -> None:
    """Delete what a run that was killed left of checkpoints that it was writing or deleting."""
    for leftover in root.glob(".step_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


async def _to_its_end(work: Callable[..., None], *args: Any) -> None:
    """Run on a thread. If this is cancelled, wait: a thread goes on, and files must not be deleted
    while it renames their directory."""
    thread = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        await asyncio.shield(thread)
    except asyncio.CancelledError:
        while not thread.done():
            with suppress(asyncio.CancelledError):  # another one, which changes nothing
                await asyncio.wait({thread})
        if not thread.cancelled():
            thread.exception()  # retrieved: the cancellation counts
        raise


def _finish(temporary: Path, final: Path, step: int, state: str) -> None:
    (temporary / "state.json").write_text(state)
    files = _take_checksums(temporary)
    files |= _digests(temporary, skip=files)
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        list(threads.map(_fsync, _files(temporary).values()))
    (temporary / MANIFEST).write_text(
        json.dumps({"schema": SCHEMA, "step": step, "files": files}, indent=1)
    )
    for folder in [*(path for path in temporary.rglob("*") if path.is_dir()), temporary]:
        _fsync(folder)
    _fsync(temporary / MANIFEST)
    _delete(final)
    temporary.rename(final)
    _fsync(final.parent)
    _VERIFIED[final] = _stamps(final)


def _delete(folder: Path) -> None:
    """Delete a checkpoint. It loses its name first, so that nobody finds a part of it."""
    gone = folder.with_name(f".{folder.name}.deleted.tmp")
    with suppress(FileNotFoundError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _prune(root: Path, newest: Path, keep: int, protected: Collection[str]) -> None:
    """Delete old checkpoints beyond `keep` complete ones, except protected ones.

    Damaged checkpoints do not count. Checkpoints of later steps, which a resumed run has not
    reached again, neither count nor are deleted.
    """
    kept = 1
    older = [folder for folder in checkpoint_folders(root) if folder < newest]
    for folder in reversed([folder for folder in older if folder.name not in protected]):
        if kept >= keep:
            _delete(folder)
        else:
            kept += _is_complete(folder)


def latest_checkpoint(root: Path, last_step: int | None = None) -> Path | None:
    """Return the newest complete checkpoint, up to `last_step`.

    Damaged ones and those of an abandoned future (lineage.py) are logged and skipped.
    """
    lineage = Lineage(root.parent)
    for folder in reversed(checkpoint_folders(root)):
        if last_step is not None and folder.name > _name(last_step):
            continue
        try:
            verify_checkpoint(folder)
            lineage.check(folder, read_state(folder))
            return folder
        except CheckpointError as error:
            log.warning("%s; trying the previous checkpoint", error)
    return None


def verify_checkpoint(folder: Path) -> None:
    schema, expected = read_manifest(folder)
    if schema not in SCHEMAS:
        raise CheckpointError(
            f"checkpoint {folder} has schema {schema}; expected {SCHEMA}. Resume it with the "
            "version of Paceline that wrote it"
        )
    try:
        found = _digests(folder, expected)
    except OSError as error:  # a broken disk, missing rights, or a run that deletes it right now
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from error
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            problem = "is damaged"
            if name not in found:
                problem = "is missing"
            elif name not in expected:
                problem = "is not part of the checkpoint"
            raise CheckpointError(f"checkpoint {folder}: file {name} {problem}")


def _is_complete(folder: Path) -> bool:
    try:
        stamps = _stamps(folder)
        if _VERIFIED.get(folder) == stamps:
            return True
        verify_checkpoint(folder)
    except (CheckpointError, OSError):  # OSError: deleted by somebody else
        return False
    _VERIFIED[folder] = stamps
    return True


def _stamps(folder: Path) -> Stamps:
    """Return inode, size and time of change of each file."""
    found = ((path, path.lstat()) for path in folder.rglob("*") if not path.is_dir())
    return {
        str(path.relative_to(folder)): (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        for path, stat in found
    }


def checkpoint_folders(root: Path) -> list[Path]:
    """Return the checkpoints, oldest first, without directories such as step_00000004.backup."""
    folders = (path for path in root.glob("step_*") if path.is_dir())
    return sorted(path for path in folders if path.name.removeprefix("step_").isdecimal())


def _digests(
    folder: Path, like: Mapping[str, str] | None = None, skip: Container[str] = ()
) -> dict[str, str]:
    """Return the checksums of all other files, of the same kind as the expected ones in `like`."""
    files = {name: path for name, path in _files(folder).items() if name not in skip}
    expected = {path: like[name] for name, path in files.items() if like and name in like}
    return dict(zip(files, checksums(list(files.values()), expected), strict=True))


def _files(folder: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise CheckpointError(
                f"checkpoint {folder}: {path.name} is a symbolic link; expected regular files only"
            )
        if path.is_file() and path.name != MANIFEST:
            found[str(path.relative_to(folder))] = path
    return found


def _take_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of files that their writers have left; delete the files with them."""
    found = {}
    for path in folder.rglob(f"*{CHECKSUM}"):
        found[str(path.relative_to(folder)).removesuffix(CHECKSUM)] = path.read_text()
        path.unlink()
    return found


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
