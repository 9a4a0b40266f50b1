"""Weights between processes on one GPU: one block of its memory that the trainer writes and engines have mapped too (CUDA IPC)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.remote.worker import Worker
from paceline.sync.block import Layout
from paceline.sync.weights import Weights
from paceline.types import Role

if TYPE_CHECKING:
    import torch

Handle = tuple[Any, ...]  # what another process needs to map the memory


class CudaIpc:
    """A WeightTransport. The block is in the type engines compute with, so half the size of float32 weights for bfloat16 ones."""

    def __init__(self, trainer: Worker, layout: Layout, handle: Handle) -> None:
        self._trainer, self._layout, self._handle = trainer, layout, handle

    @classmethod
    async def connect(cls, trainer: Worker, engines: Sequence[Worker], dtype: str) -> "CudaIpc":
        layout, handle = await trainer.call(Role.ACTOR, "share_weights", dtype)
        transport = cls(trainer, layout, handle)
        for engine in engines:
            await transport.attach(engine)
        return transport

    async def publish(self, version: int) -> Weights:
        checksum: int = await self._trainer.call(Role.ACTOR, "publish_weights", version)
        return Weights(version, checksum)

    async def attach(self, engine: Worker) -> None:
        await engine.call(Role.ROLLOUT, "map_weights", self._handle, self._layout)


def this_gpu() -> str | None:
    """Which GPU this process works on, by a name that is the same in every process."""
    import torch

    return (
        str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        if torch.cuda.is_available()
        else None
    )


def handle_of(tensor: "torch.Tensor") -> Handle:
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor)[1]


def mapped(handle: Handle) -> "torch.Tensor":
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    return rebuild_cuda_tensor(*handle)


def in_type(layout: Layout, dtype: str) -> Layout:
    """The same tensors with their numbers in another type."""
    return [
        (name, shape, dtype if kind.startswith(("float", "bfloat")) else kind)
        for name, shape, kind in layout
    ]
