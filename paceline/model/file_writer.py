"""Files that several threads write from chunks of host memory, with their checksums.

A thread writes a chunk and sums its bytes while the next ones are filled. Where possible, it writes
past the page cache, which saves a copy. The checksum is written to a second file, so that the first
one is not read again.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from mmap import mmap
from pathlib import Path

import torch
from torch import Tensor

from paceline.checksum import CHECKSUM, join_sums, piece_sums

# A power of two, because torch rounds sizes of pinned memory up to one; whole pieces of a checksum.
CHUNK_BYTES = 2**25
DIRECT = getattr(os, "O_DIRECT", 0)
THREADS = min(16, max(4, os.cpu_count() or 1))  # most of them wait for the disk


class Chunks:
    """Host memory for writers. It is kept, because its first use takes longer than a copy."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._changed = threading.Condition()
        self._allocated = 0

    @property
    def free(self) -> int:
        """Number of chunks that are allocated and not in use."""
        return len(self._free)

    def take(self, limit: int | None) -> Tensor:
        """Return a chunk: a new one if none is free, or wait if `limit` chunks are allocated."""
        with self._changed:
            while not self._free:
                if limit is None or self._allocated < limit:
                    self._allocated += 1
                    return _allocate()
                self._changed.wait()
            return self._free.pop()

    def give_back(self, chunk: Tensor) -> None:
        with self._changed:
            self._free.append(chunk)
            self._changed.notify()


class FileWriter:
    """Writes one file from bytes that arrive in order."""

    def __init__(self, path: Path, chunks: Chunks, threads: ThreadPoolExecutor) -> None:
        self._path, self._chunks, self._threads = path, chunks, threads
        self._end, self._closed = 0, False
        self._chunk: Tensor | None = None
        self._parts: list[Future[bytes]] = []
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._direct = -1
        if DIRECT:
            with suppress(OSError):  # not every file system can
                self._direct = os.open(path, os.O_WRONLY | DIRECT)

    def add(self, content: Tensor, limit: int | None) -> None:
        """Copy bytes, a tensor of any device; `limit` is that of `Chunks.take`."""
        while len(content):
            if self._chunk is None:
                self._chunk = self._chunks.take(limit)
            offset = self._end % CHUNK_BYTES
            part, content = content.tensor_split([CHUNK_BYTES - offset])
            self._chunk[offset : offset + len(part)].copy_(part, non_blocking=True)
            self._end += len(part)
            if self._end % CHUNK_BYTES == 0:
                self.flush()

    def flush(self) -> None:
        """Start to write the bytes of the current chunk, the last one unless it is full."""
        if self._chunk is not None:
            start = (self._end - 1) // CHUNK_BYTES * CHUNK_BYTES
            size, copied = self._end - start, _copied()
            chunk, self._chunk = self._chunk, None
            self._parts.append(self._threads.submit(self._write, chunk, start, size, copied))

    def finish(self) -> None:
        """Wait until everything is on the disk; raise OSError if it is not."""
        try:
            checksum = join_sums((part.result() for part in self._parts), self._end)
            os.fsync(self._file)
        finally:
            self.close()
        self._path.with_name(self._path.name + CHECKSUM).write_text(checksum)

    def close(self) -> None:
        """Stop writing. The file is incomplete unless `finish` has returned."""
        self._closed = True
        for part in self._parts:
            part.exception()  # waits: the file must not be closed before
        self._parts = []
        if self._chunk is not None:
            self._chunks.give_back(self._chunk)
            self._chunk = None
        for handle in {self._file, self._direct} - {-1}:
            os.close(handle)
        self._file = self._direct = -1

    def _write(self, chunk: Tensor, start: int, size: int, copied: Callable[[], None]) -> bytes:
        try:
            copied()
            if self._closed:
                return b""
            content = chunk[:size].numpy()
            sums = piece_sums(content)
            done = 0
            if self._direct >= 0 and size == CHUNK_BYTES:  # the last one need not be aligned
                with suppress(OSError):  # the same error, if it is one, comes below
                    done = os.pwrite(self._direct, content.data, start)
            while done < size:
                done += os.pwrite(self._file, content[done:].data, start + done)
            return sums
        finally:
            self._chunks.give_back(chunk)


def _allocate() -> Tensor:
    if torch.cuda.is_available():
        return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(mmap(-1, CHUNK_BYTES), dtype=torch.uint8)  # aligned to a memory page


def _copied() -> Callable[[], None]:
    """Return what waits until the copies that have been started are complete."""
    if not torch.cuda.is_available():
        return lambda: None
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event.synchronize
