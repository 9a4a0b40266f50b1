"""Picks the way for weights to go from where the trainer is to where the engines are."""

from collections.abc import Sequence
from typing import Literal

from paceline.place.worker import Worker
from paceline.sync.collective import Collective
from paceline.sync.ipc import CudaIpc
from paceline.sync.stream import Stream
from paceline.sync.transport import SharedMemory, WeightTransport
from paceline.types import Role


async def connect(
    kind: Literal["auto", "stream", "collective"], one_machine: bool, trainer: Worker, engines: Sequence[Worker], dtype: str
) -> WeightTransport:
    """`dtype`: what engines compute with."""
    if kind == "auto" and one_machine:
        gpus = {await trainer.call(Role.ACTOR, "gpu"), *[await engine.call(Role.ROLLOUT, "gpu") for engine in engines]}
        if len(gpus) == 1 and gpus != {None}:
            return await CudaIpc.connect(trainer, engines, dtype)
        return await SharedMemory.connect(trainer, engines)
    if kind == "auto":
        kind = "collective" if await trainer.call(Role.ACTOR, "on_gpu") else "stream"
    return await (Collective if kind == "collective" else Stream).connect(trainer, engines)
