"""Ways for new weights to reach the engines. A transport publishes a version on the trainer's side and says what the
engines need to take it; the engines check it before they use it."""

import os
import tempfile
from collections.abc import Sequence
from typing import IO, Protocol

from paceline.place.worker import Worker
from paceline.sync.block import Layout, block_size
from paceline.sync.weights import Weights
from paceline.types import Role


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
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        # without /proc there is no way to a file that has no name, so it keeps its name as long as we live
        make = tempfile.TemporaryFile if os.path.isdir("/proc/self/fd") else tempfile.NamedTemporaryFile
        file = make(prefix="paceline-weights-", dir=folder)
        file.truncate(max(1, block_size(layout)))
        memory = cls(trainer, layout, file)
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
        return self._file.name if isinstance(self._file.name, str) else f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
