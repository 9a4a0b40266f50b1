"""Ways for new weights to reach the engines. A transport publishes a version on the trainer's side and says what the
engines need to take it; the engines check it before they use it."""

import logging
import os
import tempfile
from collections.abc import Sequence
from typing import IO, Protocol

from paceline.errors import SyncError
from paceline.remote.worker import Worker
from paceline.sync.block import Layout, block_size
from paceline.sync.weights import Weights
from paceline.types import Role

log = logging.getLogger(__name__)


class WeightTransport(Protocol):
    async def publish(self, version: int) -> Weights:
        """Take the trainer's weights and make them available; what engines need to load them."""
        ...

    async def attach(self, engine: Worker) -> None:
        """Prepare an engine that joins later, or that has returned, to load what is published."""
        ...


class InPlace:
    """The engine is in the trainer's worker and reads its parameters, where they are or (LoRA) merged into a copy: nothing travels,
    only the version does."""

    async def publish(self, version: int) -> Weights:
        return Weights(version)

    async def attach(self, engine: Worker) -> None:
        """It has them already."""


class SharedMemory:
    """One block of shared memory: the trainer writes all tensors and their checksum, engines verify and copy.

    The file has no name once it is made: workers open it through our descriptor, so nothing is left behind however the run ends.
    """

    def __init__(self, trainer: Worker, layout: Layout, file: IO[bytes]) -> None:
        self._trainer, self._layout, self._file = trainer, layout, file

    @classmethod
    async def connect(cls, trainer: Worker, engines: Sequence[Worker]) -> "SharedMemory":
        layout: Layout = await trainer.call(Role.ACTOR, "weights_layout")
        memory = cls(trainer, layout, shared_file(block_size(layout)))
        await trainer.call(Role.ACTOR, "attach_weights", memory._path, layout)
        for engine in engines:
            await memory.attach(engine)
        return memory

    async def publish(self, version: int) -> Weights:
        checksum: int = await self._trainer.call(Role.ACTOR, "publish_weights", version)
        return Weights(version, checksum)

    async def attach(self, engine: Worker) -> None:
        await engine.call(Role.ROLLOUT, "attach_weights", self._path, self._layout)

    @property
    def _path(self) -> str:
        return (
            self._file.name
            if isinstance(self._file.name, str)
            else f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        )


def shared_file(size: int, memory: str = "/dev/shm") -> IO[bytes]:
    """In memory if there is room for all of it (a container often has only 64 MB), else on disk: whoever wrote to a page that is not to
    be had would be killed."""
    # without /proc there is no way to a file that has no name, so it keeps its name as long as we live
    make = tempfile.TemporaryFile if os.path.isdir("/proc/self/fd") else tempfile.NamedTemporaryFile
    places = [memory, tempfile.gettempdir()] if os.path.isdir(memory) else [tempfile.gettempdir()]
    for place in places:
        file = make(prefix="paceline-weights-", dir=place)
        try:
            _reserve(file, max(1, size))
            return file
        except OSError as error:
            file.close()
            log.warning(
                "%s has no room for %.2f GB of weights on their way to the engines: %s",
                place,
                size / 1e9,
                error.strerror,
            )
    raise SyncError(
        f"no room for {size / 1e9:.2f} GB of weights in {' or '.join(places)}; make some, or set sync.transport = 'stream'"
    )


def _reserve(file: IO[bytes], size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        file.truncate(size)
