"""Weight transfer between processes on one GPU: a block of its memory, mapped with CUDA IPC.

The trainer writes the block; engines map it and copy from it.
"""

from collections.abc import Sequence
from typing import Any

from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from paceline.remote.worker import Worker
from paceline.sync.block import Layout
from paceline.sync.shared_memory import BlockSource, BlockTarget, BlockTransport
from paceline.sync.transport import SOURCE

Handle = tuple[Any, ...]  # what another process needs to map the memory


class IpcSource(BlockSource):
    """The trainer's end. Its address is the handle of the memory."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(None, layout, "cuda")
        self.address: Handle = reduce_tensor(self.block.bytes)[1]


class IpcTarget(BlockTarget):
    def __init__(self, handle: Handle, layout: Layout) -> None:
        super().__init__(None, layout, rebuild_cuda_tensor(*handle))


class CudaIpc(BlockTransport):
    """A WeightTransport. The block has the dtype that engines compute with."""

    END = IpcTarget

    @classmethod
    async def connect(cls, trainer: Worker, engines: Sequence[Worker], dtype: str) -> "CudaIpc":
        layout = with_dtype(await trainer.call(SOURCE, "layout"), dtype)
        handle: Handle = await trainer.call(SOURCE, "open", IpcSource, layout)
        return await cls(trainer, layout, handle).attached(engines)


def with_dtype(layout: Layout, dtype: str) -> Layout:
    """Return the layout with all floating-point tensors in another dtype."""
    return [
        (name, shape, dtype if kind.startswith(("float", "bfloat")) else kind)
        for name, shape, kind in layout
    ]
