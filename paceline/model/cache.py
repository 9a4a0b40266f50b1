"""Cache of models that Paceline writes: built-in ones and those converted from GGUF files.

The cache is $PACELINE_CACHE, by default `paceline` in the user's cache directory (XDG), or a
directory in the temporary directory if that cannot be written.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from paceline.temporary import TemporaryFolder

log = logging.getLogger(__name__)

SAMPLED = 1 << 20  # bytes read at the start, middle and end of a file to identify its content


def cache_folder() -> Path:
    """Return $PACELINE_CACHE, by default `paceline` in the user's cache directory."""
    if chosen := os.environ.get("PACELINE_CACHE"):
        return Path(os.path.expanduser(chosen))
    parent = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if parent.startswith("~"):  # a user without a home directory
        return fallback_folder()
    return Path(parent) / "paceline"


def fallback_folder() -> Path:
    """Return a directory per user, because all users share the temporary directory."""
    return Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"


def writable_cache() -> Path:
    """Return the cache folder, or one in the temporary directory if it cannot be written."""
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except OSError as error:
        instead = fallback_folder()
        log.warning(
            "the cache directory %s cannot be written (%s): the model is stored in %s; "
            "set PACELINE_CACHE to choose another directory",
            *(cache, error.strerror or error, instead),
        )
        return instead


def install(folder: Path, build: Callable[[Path], None]) -> None:
    """Build in a temporary directory and rename it, so that no process sees an incomplete model."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Machines that share the cache may not see each other's locks.
    making = TemporaryFolder(f".{folder.name}-", folder.parent, young_s=3600.0)
    temporary = making.path
    try:
        build(temporary)
        # Others may read a model in a directory that they may read.
        temporary.chmod(0o700 | folder.parent.stat().st_mode & 0o055)
        with suppress(OSError):  # another process was faster and made the same model
            temporary.rename(folder)
    finally:
        making.close()


def sampled_bytes(file: Path) -> Iterator[bytes]:
    """Read a file of any size in milliseconds: its start, its middle and its end."""
    size = file.stat().st_size
    with file.open("rb") as data:
        for start in (0, max(0, size // 2), max(0, size - SAMPLED)):
            data.seek(start)
            yield data.read(SAMPLED)
