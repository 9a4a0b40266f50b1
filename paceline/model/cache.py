"""Cache of models that Paceline writes: built-in ones and those converted from GGUF files.

The cache is $PACELINE_CACHE, by default `paceline` in the user's cache directory (XDG), or a
directory in the temporary directory if that cannot be written. All users share the temporary
directory, so a directory there that another user can write is not used.
"""

import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from paceline.errors import ModelError
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


def readable_caches() -> list[Path]:
    """Return the directories to look for models in: those that no other user can write."""
    fallback = fallback_folder()
    folders = dict.fromkeys((cache_folder(), fallback))
    return [folder for folder in folders if folder != fallback or _is_private(folder)]


def writable_cache() -> Path:
    """Return the cache folder, or one in the temporary directory if it cannot be written.

    Raise ModelError if another user has made the one in the temporary directory.
    """
    cache, fallback = cache_folder(), fallback_folder()
    if cache != fallback:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=cache):
                return cache
        except OSError as error:
            log.warning(
                "the cache directory %s cannot be written (%s): the model is stored in %s; "
                "set PACELINE_CACHE to choose another directory",
                *(cache, error.strerror or error, fallback),
            )
    with suppress(OSError):  # the caller reports that nothing can be written there
        fallback.mkdir(mode=0o700)
    with suppress(OSError):
        _close_to_group(fallback)
    if os.path.lexists(fallback) and not _is_private(fallback):
        raise ModelError(
            f"the cache directory {fallback} is a link, or another user owns it or can write to "
            "it, so its models cannot be trusted; set PACELINE_CACHE to a directory of this user"
        )
    return fallback


def _close_to_group(folder: Path) -> None:
    """Make this user's directory private if an earlier version made it with a umask of 002.

    A directory that everybody can write, or with files of another user, stays as it is.
    """
    found, user = folder.lstat(), os.getuid()  # of a link itself
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user:
        return
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) == stat.S_IWGRP:
        folder.chmod(0o700)  # first: no other user can add files during the check
        if any(file.lstat().st_uid != user for file in folder.rglob("*")):
            folder.chmod(stat.S_IMODE(found.st_mode))


def _is_private(folder: Path) -> bool:
    """Return whether it is a directory of this user that no other user can write."""
    try:
        found = folder.lstat()  # of a link itself
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & others
    )


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
        for start in (0, size // 2, max(0, size - SAMPLED)):
            data.seek(start)
            yield data.read(SAMPLED)
