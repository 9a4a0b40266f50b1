"""Temporary directories that do not stay when their process is killed.

A process locks its directories. The next one that makes a directory removes those that nobody
locks, which are left from processes that were killed.
"""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

YOUNG_S = 5.0  # a new directory may not be locked yet


class TemporaryFolder:
    """A directory that exists until it is closed or the process ends and another one starts."""

    def __init__(self, prefix: str, parent: Path | None = None, young_s: float = YOUNG_S) -> None:
        """Remove leftovers with this prefix that are older than `young_s`, then make it."""
        parent = parent or Path(tempfile.gettempdir())
        remove_leftovers(prefix, parent, young_s)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock: int | None = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def remove_leftovers(prefix: str, parent: Path, young_s: float = YOUNG_S) -> None:
    """Remove directories of this user that no process locks."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # it is in use, gone, or not ours
            stat = folder.lstat()
            if stat.st_uid == os.getuid() and time.time() - stat.st_mtime > young_s:
                _remove_unlocked(folder)


def _remove_unlocked(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
