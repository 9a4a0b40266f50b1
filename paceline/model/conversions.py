"""Converted GGUF files in the cache: the list of their directories, and how they are removed.

A changed or moved GGUF file has a new directory, so the directory of the old one stays unused.
"""

import fcntl
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ModelError
from paceline.model.cache import readable_caches
from paceline.model.gguf_cache import MARK, is_complete


@dataclass(frozen=True, slots=True)
class Conversion:
    folder: Path
    source: Path | None  # the GGUF file; None if the directory does not say it
    is_used: bool  # by a run with this GGUF file as it is now

    @property
    def size(self) -> int:
        """Bytes of the directory."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


def conversions() -> Iterator[Conversion]:
    """Yield the directories of the cache, also those that a killed process left incomplete."""
    for cache in readable_caches():
        for folder in sorted(cache.glob("models/*")):
            if folder.is_dir() and not _is_being_written(folder):
                source = _source(folder)
                yield Conversion(folder, source, source is not None and is_complete(folder, source))


def remove_conversions(everything: bool = False) -> list[tuple[Conversion, int]]:
    """Remove the directories that no run would use, or all. Return them with their bytes."""
    removed = [(each, each.size) for each in conversions() if everything or not each.is_used]
    for each, _ in removed:
        try:
            shutil.rmtree(each.folder)
        except OSError as error:
            raise ModelError(
                f"cannot remove {each.folder}: {error.strerror or error}; remove it as the user "
                "who owns it"
            ) from error
    return removed


def _source(folder: Path) -> Path | None:
    try:
        mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
        return Path(mark["source"]["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_being_written(folder: Path) -> bool:
    """Return whether a process that converts holds the lock of this directory."""
    name = folder.name
    if name.startswith("."):  # a temporary directory, see cache.install
        name = name[1:].rpartition("-")[0]
    try:
        with (folder.parent / f".{name}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
