"""The bytes of all weights of one version, in the order in which the trainer exports them."""

import math
from collections.abc import Iterable

import torch

from paceline.errors import SyncError
from paceline.sync.weights import Weights

Tensors = Iterable[tuple[str, torch.Tensor]]
Layout = list[tuple[str, tuple[int, ...], str]]  # name, shape, dtype

ALIGNMENT = 64
MULTIPLIER = 0x9E3779B97F4A7C15
CHUNK = 4 << 20  # bytes that are sent and summed at a time; part of the checksum


class WeightBlock:
    """Named tensors over the bytes: of a file that other processes map too (`path`), of existing
    memory (`over`), or of new memory on `device`."""

    def __init__(
        self,
        path: str | None,
        layout: Layout,
        device: str = "cpu",
        over: torch.Tensor | None = None,
    ) -> None:
        size = block_size(layout)
        if over is not None:
            self.bytes = over
        elif path is None:
            pinned = device == "cpu" and torch.cuda.is_available()
            self.bytes = torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pinned)
        else:
            self.bytes = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        self.tensors: dict[str, torch.Tensor] = {}
        self.ends: dict[str, int] = {}  # where each tensor's bytes end, padding included
        offset = 0
        for name, shape, dtype_name in layout:
            dtype = getattr(torch, dtype_name)
            size = _size(shape, dtype_name)
            self.tensors[name] = self.bytes[offset : offset + size].view(dtype).view(shape)
            offset += _aligned(size)
            self.ends[name] = offset

    @property
    def view(self) -> memoryview:
        return self.bytes.numpy().data

    def write(self, tensors: Tensors) -> int:
        """Copy all tensors in and return the checksum."""
        missing = set(self.tensors)
        for name, tensor in tensors:
            self.tensors[name].copy_(tensor)
            missing.discard(name)
        self.check_complete(missing)
        return self.checksum()

    def check_complete(self, missing: set[str]) -> None:
        if missing:
            raise SyncError(
                f"the trainer did not export {sorted(missing)[:3]}; "
                f"expected all {len(self.tensors)} tensors of the layout"
            )

    def checksum(self) -> int:
        total = 0
        for start in range(0, len(self.bytes), CHUNK):
            total = add_to_checksum(total, self.bytes[start : start + CHUNK])
        return total

    def verify(self, weights: Weights) -> None:
        check(self.checksum(), weights)


def add_to_checksum(total: int, chunk: torch.Tensor) -> int:
    """Return the checksum with one more chunk: a sum of words, as fast as memory on any device.

    The order of chunks counts. Every flipped bit changes the checksum, and so does every chunk that
    is missing, misplaced or of another version.
    """
    return (total * MULTIPLIER + int(chunk.view(torch.int64).sum())) % (1 << 64)


def check(found: int, weights: Weights) -> None:
    if found != weights.checksum:
        raise SyncError(
            f"weights of version {weights.version} are corrupted: checksum {found:#x}, "
            f"expected {weights.checksum:#x}"
        )


def layout_of(tensors: Tensors) -> Layout:
    return [
        (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors
    ]


def block_size(layout: Layout) -> int:
    return max(ALIGNMENT, sum(_aligned(_size(shape, dtype)) for _, shape, dtype in layout))


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)


def _aligned(size: int) -> int:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
