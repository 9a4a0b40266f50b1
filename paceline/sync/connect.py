"""Selects the weight transport: by `sync.transport`, or by where trainer and engines run."""

from collections.abc import Sequence
from typing import Literal

from paceline.remote.worker import Worker
from paceline.sync.collective import Collective
from paceline.sync.ipc import CudaIpc
from paceline.sync.shared_memory import SharedMemory
from paceline.sync.stream import Stream
from paceline.sync.transport import SOURCE, TARGET
from paceline.sync.weights import WeightTransport


async def connect(
    kind: Literal["auto", "stream", "collective"],
    one_machine: bool,
    trainer: Worker,
    engines: Sequence[Worker],
    dtype: str,
) -> WeightTransport:
    """Open a transport. `dtype`: what engines compute with."""
    if kind == "auto":
        gpus = [await trainer.call(SOURCE, "gpu")]
        gpus += [await engine.call(TARGET, "gpu") for engine in engines]
        if one_machine and gpus[0] and len(set(gpus)) == 1:
            return await CudaIpc.connect(trainer, engines, dtype)
        if one_machine:
            return await SharedMemory.connect(trainer, engines)
        # NCCL needs a separate GPU for each process.
        distinct = None not in gpus and len(set(gpus)) == len(gpus)
        kind = "collective" if distinct else "stream"
    return await (Collective if kind == "collective" else Stream).connect(trainer, engines)
