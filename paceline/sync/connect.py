"""Picks the way for weights to go from where the trainer is to where the engines are."""

from collections.abc import Sequence
from typing import Literal

from paceline.remote.worker import Worker
from paceline.sync.collective import Collective
from paceline.sync.ipc import CudaIpc
from paceline.sync.stream import Stream
from paceline.sync.transport import SharedMemory, WeightTransport
from paceline.types import Role


async def connect(
    kind: Literal["auto", "stream", "collective"],
    one_machine: bool,
    trainer: Worker,
    engines: Sequence[Worker],
    dtype: str,
) -> WeightTransport:
    """`dtype`: what engines compute with."""
    if kind == "auto":
        gpus = [
            await trainer.call(Role.ACTOR, "gpu"),
            *[await engine.call(Role.ROLLOUT, "gpu") for engine in engines],
        ]
        if one_machine and gpus[0] and len(set(gpus)) == 1:
            return await CudaIpc.connect(trainer, engines, dtype)
        if one_machine:
            return await SharedMemory.connect(trainer, engines)
        kind = (
            "collective" if None not in gpus and len(set(gpus)) == len(gpus) else "stream"
        )  # NCCL wants a GPU for each
    return await (Collective if kind == "collective" else Stream).connect(trainer, engines)
