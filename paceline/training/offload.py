"""Offload of device tensors to host memory while another component needs the device.

Only the storages move; the tensors stay the same objects, so tensors that share a storage (fused
weights, shards, tied layers) still share it afterwards. Copies run concurrently.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Moved:
    bytes: int
    seconds: float


class HostOffload:
    """Host copies of offloaded device tensors."""

    def __init__(self) -> None:
        self._offloaded: list[tuple[torch.UntypedStorage, Tensor]] = []

    def place(self, where: Literal["device", "host"], tensors: Iterable[Tensor]) -> Moved:
        """Restore what is offloaded, or offload these tensors."""
        return self.restore() if where == "device" else self.offload(tensors)

    def offload(self, tensors: Iterable[Tensor]) -> Moved:
        """Copy these tensors to host memory and free their device memory; ignore CPU tensors."""
        started = time.perf_counter()
        storages = {
            s.data_ptr(): s for s in map(_storage, tensors) if s.device.type != "cpu" and s.nbytes()
        }
        for storage in storages.values():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
            host.copy_(_bytes(storage), non_blocking=True)
            self._offloaded.append((storage, host))
        if storages:
            torch.cuda.synchronize()
        moved = sum(storage.nbytes() for storage in storages.values())
        for storage in storages.values():
            storage.resize_(0)
        return Moved(moved, time.perf_counter() - started)

    def restore(self) -> Moved:
        """Copy the contents back into the same tensors."""
        started = time.perf_counter()
        moved = 0
        for storage, host in self._offloaded:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
            moved += host.numel()
        if self._offloaded:
            torch.cuda.synchronize()
        self._offloaded.clear()
        return Moved(moved, time.perf_counter() - started)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
