"""Tensors put away in host memory while somebody else needs the device, and brought back.

It is the memory behind them that moves: tensors stay the same objects, so views of one another (fused weights, shards, tied layers)
still are afterwards. Copies run side by side and are waited for once.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Moved:
    bytes: int
    seconds: float


class HostOffload:
    """Where the contents of device tensors lie while they are away."""

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []

    def offload(self, tensors: Iterable[Tensor]) -> Moved:
        """Free the device memory of these tensors. What is in host memory already stays where it is."""
        started = time.perf_counter()
        storages = {
            s.data_ptr(): s for s in map(_storage, tensors) if s.device.type != "cpu" and s.nbytes()
        }
        for storage in storages.values():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
            host.copy_(_bytes(storage), non_blocking=True)
            self._away.append((storage, host))
        if storages:
            torch.cuda.synchronize()
        moved = sum(storage.nbytes() for storage in storages.values())
        for storage in storages.values():
            storage.resize_(0)
        return Moved(moved, time.perf_counter() - started)

    def restore(self) -> Moved:
        """Fill the same tensors again."""
        started = time.perf_counter()
        moved = 0
        for storage, host in self._away:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
            moved += host.numel()
        if self._away:
            torch.cuda.synchronize()
        self._away.clear()
        return Moved(moved, time.perf_counter() - started)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
