"""Checksums of files, which detect damage, not an attacker. They cost less than reading the file.

The bytes are divided into pieces of 256 rows of 512 words. The checksum is the SHA-256 of the sums
of all rows and columns, so every changed, missing or misplaced word changes it. Threads can sum
parts of a file that begin at a multiple of a piece.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROWS, COLUMNS = 256, 512
PIECE_BYTES = 8 * ROWS * COLUMNS
PART_BYTES = 2**24  # of a file that a thread reads at a time: a multiple of PIECE_BYTES
PREFIX = "sums:"
CHECKSUM = ".checksum"  # ends the name of a file with the checksum of another file
MAX_THREADS = 16


def piece_sums(content: NDArray[np.uint8]) -> bytes:
    """Return the sums of the pieces in a part of a file; zeros fill its last piece."""
    if missing := -len(content) % PIECE_BYTES:
        whole = len(content) // PIECE_BYTES * PIECE_BYTES
        last = np.concatenate([content[whole:], np.zeros(missing, np.uint8)])
        return piece_sums(content[:whole]) + piece_sums(last)
    sums = []
    for piece in content.view("<u8").reshape(-1, ROWS, COLUMNS):  # one stays in the cache
        sums += [piece.sum(axis=0).tobytes(), piece.sum(axis=1).tobytes()]
    return b"".join(sums)


def join_sums(sums: Iterable[bytes], size: int) -> str:
    """Return the checksum of a file of `size` bytes, given the sums of all its parts in order."""
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    for part in sums:
        digest.update(part)
    return PREFIX + digest.hexdigest()


def checksums(files: Sequence[Path], like: Mapping[Path, str] | None = None) -> list[str]:
    """Return the checksums of files, read by several threads; raise OSError if one is unreadable.

    `like`: the expected checksums. Where one is a plain SHA-256 of the file, as in old
    checkpoints, this is what is returned.
    """
    expected = like or {}
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        found: list[Callable[[], str]] = []
        for path in files:
            if expected.get(path, PREFIX).startswith(PREFIX):
                size = path.stat().st_size
                starts = range(0, size, PART_BYTES)
                parts = threads.map(partial(_part_sums, path), starts)
                found.append(partial(join_sums, parts, size))
            else:
                found.append(threads.submit(_sha256, path).result)
        return [result() for result in found]


def _part_sums(path: Path, start: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        content = np.empty(PART_BYTES, np.uint8)
        end = 0
        while end < PART_BYTES and (read := file.readinto(content[end:].data)):
            end += read
        return piece_sums(content[:end])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
