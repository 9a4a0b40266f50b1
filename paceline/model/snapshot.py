"""A copy of tensors in host memory, which a thread writes to files while training continues.

`write_tensors` (tensor_file.py) asks `current_snapshot`: inside `Snapshot.taking()` it creates its
file, writes the header and leaves the tensors to the snapshot. The memory is kept for the next
snapshot, because its first use takes longer than the copy.
"""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 2**26  # a power of two: torch rounds sizes of pinned memory up to one
CGROUP = Path("/sys/fs/cgroup")


class Snapshot:
    """Host memory for the files of one checkpoint at a time."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._end = 0  # bytes in use
        self._files: list[tuple[IO[bytes], int, int]] = []  # with their range of bytes
        self.written: Future[None] = Future()  # of the last snapshot
        self.written.set_result(None)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Copy what is written in this context, then start to write it to its files."""
        self.written.result()  # the memory is still in use until then
        self._end = 0
        token = _CURRENT.set(self)
        try:
            yield
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
        except BaseException:
            self._close()
            raise
        finally:
            _CURRENT.reset(token)
        self.written = Future()
        threading.Thread(target=self._write, name="checkpoint", daemon=True).start()

    def has_room(self, size: int) -> bool:
        """Return whether there is memory for so many bytes more, on all ranks."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        missing = ranks * (self._end + size - len(self._chunks) * CHUNK_BYTES)
        return missing <= 0 or missing < available_memory() // 2

    def add(self, file: IO[bytes], tensors: Iterable[Tensor]) -> None:
        """Copy tensors, which will be written to the open file."""
        start = self._end
        self._files.append((file, start, start))
        for tensor in tensors:
            self._copy(tensor.detach().contiguous().view(-1).view(torch.uint8))
        self._files[-1] = (file, start, self._end)

    def _copy(self, content: Tensor) -> None:
        while len(content):
            number, offset = divmod(self._end, CHUNK_BYTES)
            if number == len(self._chunks):
                pinned = torch.cuda.is_available()
                self._chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned))
            part, content = content.tensor_split([CHUNK_BYTES - offset])
            to = self._chunks[number][offset : offset + len(part)]
            to.copy_(part, non_blocking=True)
            self._end += len(part)

    def _write(self) -> None:
        try:
            for file, start, end in self._files:
                while start < end:
                    number, offset = divmod(start, CHUNK_BYTES)
                    part = self._chunks[number][offset : offset + end - start]
                    file.write(part.numpy().data)
                    start += len(part)
                file.close()  # before the next one: a full disk shows here
        except BaseException as error:
            self._close()
            self.written.set_exception(error)
        else:
            self._files = []
            self.written.set_result(None)

    def _close(self) -> None:
        files, self._files = self._files, []
        for file, *_ in files:
            with suppress(OSError):
                file.close()


_CURRENT: ContextVar[Snapshot | None] = ContextVar("snapshot", default=None)


def current_snapshot() -> Snapshot | None:
    return _CURRENT.get()


def available_memory() -> int:
    """Return the bytes of host memory that this process can use, at most (Linux; elsewhere 0)."""
    found = 0
    with suppress(OSError, ValueError):
        found = _field(Path("/proc/meminfo"), "MemAvailable:") * 1024
    with suppress(OSError, ValueError):  # there is no limit: "max"
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        found = min(found, limit - used + _field(CGROUP / "memory.stat", "file"))
    return found


def _field(path: Path, name: str) -> int:
    lines = (line.split() for line in path.read_text().splitlines())
    return next(int(value) for found, value, *_ in lines if found == name)
