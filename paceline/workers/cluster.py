"""The protocol of a cluster: nodes with devices, and workers that are started on them.

A device is a GPU. On nodes without GPUs a CPU slot counts as a device, so that every placement can
be tried anywhere.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.environment.remote import Launch
from paceline.errors import ConfigError
from paceline.remote.worker import Worker
from paceline.types import Role


@dataclass(frozen=True, slots=True)
class Node:
    """A machine, or the part of it that a run may use."""

    name: str
    cpus: int
    gpus: int = 0
    memory: int = 0  # bytes; 0: unknown
    gpu_memory: int = 0  # bytes of each GPU
    cores: tuple[int, ...] = ()  # that workers can be pinned to; empty: no pinning
    gpu_name: str = ""  # of its GPUs, if known
    capability: int = 0  # major compute capability of its oldest GPU; 0: unknown

    @property
    def devices(self) -> "tuple[Device, ...]":
        return tuple(Device(self.name, index) for index in range(self.gpus or self.cpus))


@dataclass(frozen=True, slots=True)
class Device:
    node: str
    index: int  # among its GPUs or CPU slots

    def __str__(self) -> str:
        return f"{self.node}:{self.index}"


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    name: str
    roles: tuple[Role, ...]
    ranks: int = 0  # 0: not a group
    threads: int = 1  # of each rank
    cores: tuple[int, ...] = ()  # of all its ranks; empty: not pinned
    pool: str = ""
    devices: tuple[Device, ...] = ()  # one per rank; empty: any
    alone: bool = False  # the only worker of the run

    @property
    def processes(self) -> int:
        return max(1, self.ranks)


def parse_nodes(text: str) -> list[Node]:
    """Return the nodes of a cluster that is not there: "4x8:80GB", or "8:80GB" for one node."""
    found = re.fullmatch(r"(?:(\d+)x)?(\d+):(\d+(?:\.\d+)?) ?GB", text.strip(), re.IGNORECASE)
    if not found or not (int(found[1] or 1) and int(found[2]) and float(found[3])):
        raise ConfigError(
            f"devices {text!r}: expected nodes x GPUs : memory of a GPU, for example 4x8:80GB, or "
            "8:24GB for one node"
        )
    gpus, memory = int(found[2]), int(float(found[3]) * (1 << 30))
    return [Node(f"node{i}", 0, gpus, gpu_memory=memory) for i in range(int(found[1] or 1))]


def available_cores() -> list[int]:
    """Return the cores of this machine that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class Cluster(Protocol):
    def nodes(self) -> list[Node]: ...

    async def reserve(self, plans: Sequence[PlannedWorker]) -> None:
        """Reserve the devices of these workers, pool by pool, or raise.

        A worker that joins later needs no reservation.
        """
        ...

    async def start(self, plan: PlannedWorker) -> Worker:
        """Start a worker. `await worker.ready()` waits until it has built its parts."""
        ...

    def launcher(self) -> Launch | None:
        """Return what starts an environment worker on any node.

        None: environment workers are processes of the controller's machine.
        """
        ...

    async def close(self) -> None:
        """Release all reservations. The caller has closed the workers before."""
        ...
