"""Weight transfer between processes on one GPU: a block of its memory, mapped with CUDA IPC.

The trainer writes the block; engines map it and copy from it.
"""

from collections.abc import Sequence
from typing import Any

from paceline.remote.worker import Worker
from paceline.sync.block import Layout
from paceline.sync.shared_memory import BlockSource, BlockTarget
from paceline.sync.transport import SOURCE, TARGET, publish
from paceline.sync.weights import Weights

Handle = tuple[Any, ...]  # what another process needs to map the memory


class IpcSource(BlockSource):
    """The trainer's end. Its address is the handle of the memory."""

    def __init__(self, layout: Layout) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        super().__init__(None, layout, "cuda")
        self.address: Handle = reduce_tensor(self.block.bytes)[1]


class IpcTarget(BlockTarget):
    """An engine's end."""

    def __init__(self, handle: Handle, layout: Layout) -> None:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        super().__init__(None, layout, rebuild_cuda_tensor(*handle))


class CudaIpc:
    """A WeightTransport. The block has the dtype that engines compute with."""

    def __init__(self, trainer: Worker, layout: Layout, handle: Handle) -> None:
        self._trainer, self._layout, self._handle = trainer, layout, handle

    @classmethod
    async def connect(cls, trainer: Worker, engines: Sequence[Worker], dtype: str) -> "CudaIpc":
        layout = with_dtype(await trainer.call(SOURCE, "layout"), dtype)
        handle: Handle = await trainer.call(SOURCE, "open", IpcSource, layout)
        transport = cls(trainer, layout, handle)
        for engine in engines:
            await transport.attach(engine)
        return transport

    async def publish(self, version: int) -> Weights:
        return await publish(self._trainer, version)

    async def attach(self, engine: Worker) -> None:
        await engine.call(TARGET, "open", IpcTarget, self._handle, self._layout)


def with_dtype(layout: Layout, dtype: str) -> Layout:
    """Return the layout with all floating-point tensors in another dtype."""
    return [
        (name, shape, dtype if kind.startswith(("float", "bfloat")) else kind)
        for name, shape, kind in layout
    ]
