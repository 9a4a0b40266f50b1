"""Files of a checkpoint, which threads write while training continues.

`write_tensors` (tensor_file.py) asks `current_snapshot`: inside `Snapshot.taking()` it leaves the
file to the snapshot, which copies the tensors to host memory.
"""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.model import file_writer
from paceline.model.file_writer import THREADS, Chunks, FileWriter

CGROUP = Path("/sys/fs/cgroup")


class Snapshot:
    """Host memory and threads for the files of one checkpoint at a time."""

    def __init__(self) -> None:
        self._chunks = Chunks()
        self._beside = True
        self._writers: list[FileWriter] = []
        self._threads: ThreadPoolExecutor | None = None
        self.written: Future[None] = Future()  # of the last snapshot
        self.written.set_result(None)

    @contextmanager
    def taking(self, beside: bool = True) -> Iterator[None]:
        """Copy what is written in this context, and write it to its files.

        With `beside`, `written` tells when they are complete. Otherwise they are complete when the
        context ends, and a few chunks of memory suffice.
        """
        with suppress(Exception):  # who waits for that snapshot knows
            self.written.result()  # the memory is still in use until then
        self._beside = beside
        self._threads = ThreadPoolExecutor(THREADS, "checkpoint")
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
        if beside:
            threading.Thread(target=self._finish, name="checkpoint", daemon=True).start()
        else:
            self._finish()
            self.written.result()

    def add(self, path: Path, header: bytes, size: int, tensors: Iterable[Tensor]) -> None:
        """Copy the bytes of a file: a header, and tensors of `size` bytes."""
        assert self._threads is not None
        at_once = not self._beside or not self._has_room(len(header) + size)
        limit = 2 * THREADS if at_once else None
        writer = FileWriter(path, self._chunks, self._threads)
        self._writers.append(writer)
        writer.add(torch.frombuffer(bytearray(header), dtype=torch.uint8), limit)
        for tensor in tensors:
            writer.add(tensor.detach().contiguous().view(-1).view(torch.uint8), limit)
            del tensor  # before the next one is gathered
        writer.flush()
        if at_once and self._beside:
            self._writers.remove(writer)
            writer.finish()

    def _has_room(self, size: int) -> bool:
        """Return whether there is memory for so many bytes more, on all ranks."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        chunk = file_writer.CHUNK_BYTES
        missing = ranks * (-(-size // chunk) * chunk - self._chunks.free * chunk)
        return missing <= 0 or missing < available_memory() // 2

    def _finish(self) -> None:
        try:
            while self._writers:
                self._writers[0].finish()
                del self._writers[0]
        except BaseException as error:
            self._close()
            self.written.set_exception(error)
        else:
            self._close()
            self.written.set_result(None)

    def _close(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.close()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


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
