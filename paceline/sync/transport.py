"""Ways for new weights to reach the engines. A transport publishes a version on the trainer's side and says what the
engines need to take it; the engines check it before they use it."""

import os
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline.errors import SyncError
from paceline.place.worker import Worker
from paceline.sync.weights import Weights
from paceline.types import Role

if TYPE_CHECKING:
    import torch

Layout = list[tuple[str, tuple[int, ...], str]]  # name, shape, dtype


class WeightTransport(Protocol):
    async def publish(self, version: int) -> Weights: ...


class InPlace:
    """The engine is in the trainer's worker and reads its parameters, where they are or (LoRA) merged into a copy: nothing travels,
    only the version does."""

    async def publish(self, version: int) -> Weights:
        return Weights(version)


class SharedMemory:
    """One block of shared memory: the trainer writes all tensors and their checksum, engines verify and copy.

    The file has a name only until every worker has opened it, so nothing is left behind however the run ends.
    """

    def __init__(self, trainer: Worker) -> None:
        self._trainer = trainer

    @classmethod
    async def connect(cls, trainer: Worker, engines: list[Worker]) -> "SharedMemory":
        layout = await trainer.call(Role.ACTOR, "weights_layout")
        handle, name = tempfile.mkstemp(prefix="paceline-weights-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        try:
            os.ftruncate(handle, max(1, block_size(layout)))
            await trainer.call(Role.ACTOR, "attach_weights", name, layout)
            for engine in engines:
                await engine.call(Role.ROLLOUT, "attach_weights", name, layout)
        finally:
            os.close(handle)
            Path(name).unlink()
        return cls(trainer)

    async def publish(self, version: int) -> Weights:
        checksum: int = await self._trainer.call(Role.ACTOR, "publish_weights", version)
        return Weights(version, checksum)


class WeightBlock:
    """A worker's view of the shared block: named tensors over the same bytes."""

    def __init__(self, path: str, layout: Layout) -> None:
        import torch

        self._bytes = torch.from_file(path, shared=True, size=max(1, block_size(layout)), dtype=torch.uint8)
        self.tensors: dict[str, torch.Tensor] = {}
        offset = 0
        for name, shape, dtype_name in layout:
            dtype = getattr(torch, dtype_name)
            size = _size(shape, dtype_name)
            self.tensors[name] = self._bytes[offset : offset + size].view(dtype).view(shape)
            offset += _aligned(size)

    def write(self, tensors: "Iterable[tuple[str, torch.Tensor]]") -> int:
        """Copy all tensors in; returns the checksum."""
        missing = set(self.tensors)
        for name, tensor in tensors:
            self.tensors[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise SyncError(f"the trainer did not export {sorted(missing)[:3]}; all {len(self.tensors)} tensors of the layout are needed")
        return self.checksum()

    def checksum(self) -> int:
        return zlib.crc32(self._bytes.numpy().data)

    def verify(self, weights: Weights) -> None:
        found = self.checksum()
        if found != weights.checksum:
            raise SyncError(f"weights of version {weights.version} arrived damaged: checksum {found:#x}, expected {weights.checksum:#x}")


def layout_of(tensors: "Iterable[tuple[str, torch.Tensor]]") -> Layout:
    return [(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors]


def block_size(layout: Layout) -> int:
    return sum(_aligned(_size(shape, dtype)) for _, shape, dtype in layout)


def _size(shape: tuple[int, ...], dtype: str) -> int:
    import torch

    count = 1
    for dim in shape:
        count *= dim
    return count * int(getattr(torch, dtype).itemsize)


def _aligned(size: int) -> int:
    return (size + 63) // 64 * 64
