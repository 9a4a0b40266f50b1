"""What a place to run in offers, whatever it is: nodes with devices, and workers started on them.

A device is a GPU; on nodes without one a CPU slot stands in for it, so that every placement can be tried anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.remote.worker import Worker
from paceline.types import Role


@dataclass(frozen=True, slots=True)
class Node:
    """A machine, or the part of one that a run may use."""

    name: str
    cpus: int
    gpus: int = 0
    memory: int = 0  # bytes; 0 = not known
    gpu_memory: int = 0  # bytes of each GPU
    cores: tuple[int, ...] = ()  # that workers can be pinned to; empty = not from here

    @property
    def devices(self) -> "tuple[Device, ...]":
        return tuple(Device(self.name, index) for index in range(self.gpus or self.cpus))


@dataclass(frozen=True, slots=True)
class Device:
    node: str
    index: int  # of its GPUs, or of its CPU slots

    def __str__(self) -> str:
        return f"{self.node}:{self.index}"


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    name: str
    roles: tuple[Role, ...]
    ranks: int = 0  # 0 = not a group
    threads: int = 1  # of each rank
    cores: tuple[int, ...] = ()  # of all its ranks; empty = not pinned
    pool: str = ""
    devices: tuple[Device, ...] = ()  # one per rank; empty = wherever there is room
    alone: bool = False  # the only worker of the run

    @property
    def processes(self) -> int:
        return max(1, self.ranks)


class Cluster(Protocol):
    def nodes(self) -> list[Node]:
        """What there is to run on."""
        ...

    async def reserve(self, plans: Sequence[PlannedWorker]) -> None:
        """Take the devices of all these workers, pool by pool, or raise. A worker that joins later needs no reservation."""
        ...

    async def start(self, plan: PlannedWorker) -> Worker:
        """Start a worker, also during a run. Returns at once; `await worker.ready()` waits until it has built its parts."""
        ...

    async def close(self) -> None:
        """Give everything back. Workers are closed before, by whoever started them."""
        ...
