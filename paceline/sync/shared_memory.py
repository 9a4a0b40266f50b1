"""Weight transfer between processes of one machine through a block of shared memory.

The trainer writes all tensors and their checksum; engines verify and copy them. The file has no
name once it is open: workers reach it through the controller's descriptor, so nothing is left
behind.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import IO, Any, Self

import torch

from paceline.errors import SyncError
from paceline.remote.worker import Worker
from paceline.sync.block import Layout, Tensors, WeightBlock, block_size
from paceline.sync.transport import SOURCE, TARGET, Load, publish
from paceline.sync.weights import Weights

log = logging.getLogger(__name__)


class BlockSource:
    """The trainer's end: writes into a block that engines map too."""

    address: object = None

    def __init__(self, path: str | None, layout: Layout, device: str = "cpu") -> None:
        self.block = WeightBlock(path, layout, device)

    def write(self, tensors: Tensors, version: int) -> int:
        return self.block.write(tensors)


class BlockTarget:
    """An engine's end: copies out of the block that the trainer writes."""

    address = None

    def __init__(self, path: str | None, layout: Layout, over: torch.Tensor | None = None) -> None:
        self.intact = True
        self.block = WeightBlock(path, layout, over=over)

    def load(self, weights: Weights, into: Load) -> None:
        self.block.verify(weights)
        self.intact = False
        into(self.block.tensors.items(), weights.version)
        # The trainer does not wait for a late engine: it may have started on the next version.
        self.block.verify(weights)
        self.intact = True


class BlockTransport:
    """A WeightTransport over a block of memory that the trainer and all engines map."""

    END: Callable[..., BlockTarget] = BlockTarget

    def __init__(self, trainer: Worker, layout: Layout, address: Any) -> None:
        self._trainer, self._layout, self._address = trainer, layout, address

    async def publish(self, version: int) -> Weights:
        return await publish(self._trainer, version)

    async def attach(self, engine: Worker) -> None:
        await engine.call(TARGET, "open", self.END, self._address, self._layout)

    async def attached(self, engines: Sequence[Worker]) -> Self:
        for engine in engines:
            await self.attach(engine)
        return self


class SharedMemory(BlockTransport):
    _file: IO[bytes]

    @classmethod
    async def connect(cls, trainer: Worker, engines: Sequence[Worker]) -> "SharedMemory":
        layout: Layout = await trainer.call(SOURCE, "layout")
        file = shared_file(block_size(layout))
        named = isinstance(file.name, str)
        path = file.name if named else f"/proc/{os.getpid()}/fd/{file.fileno()}"
        await trainer.call(SOURCE, "open", BlockSource, path, layout)
        memory = cls(trainer, layout, path)
        memory._file = file  # open as long as the transport
        return await memory.attached(engines)


def shared_file(size: int, memory: str = "/dev/shm") -> IO[bytes]:
    """Return an open file in memory if all of it fits, else on disk.

    Containers often have only 64 MB of shared memory, and writing to a page that does not exist
    would kill the process; so all space is reserved at once.
    """
    # Without /proc an unnamed file cannot be opened by another process: keep the name.
    unnamed = os.path.isdir("/proc/self/fd")
    make = tempfile.TemporaryFile if unnamed else tempfile.NamedTemporaryFile
    places = [memory] if os.path.isdir(memory) else []
    places.append(tempfile.gettempdir())
    for place in places:
        file = make(prefix="paceline-weights-", dir=place)
        try:
            _reserve(file, max(1, size))
            return file
        except OSError as error:
            file.close()
            gigabytes = size / 1e9
            log.warning(
                "%s has no room for %.2f GB of weights: %s", place, gigabytes, error.strerror
            )
    raise SyncError(
        f"no room for {size / 1e9:.2f} GB of weights in {' or '.join(places)}; free some space, "
        "or set sync.transport = 'stream'"
    )


def _reserve(file: IO[bytes], size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        file.truncate(size)
