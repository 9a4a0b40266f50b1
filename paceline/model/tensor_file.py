"""Safetensors files read and written tensor by tensor, so no process holds a second model."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import CheckpointError

MODEL_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

Shape = tuple[int, ...]
Region = tuple[slice, ...]  # part of a tensor that a rank holds; () means the full tensor
Layout = list[tuple[str, Shape, torch.dtype]]


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of several safetensors files by name, read on access."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.path = paths[0] if len(paths) == 1 else paths[0].parent
        self._owner: dict[str, Any] = {}
        for path in paths:
            try:
                file = safe_open(path, "pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"cannot read {path}: {error}") from error
            self._owner |= dict.fromkeys(file.keys(), file)

    @classmethod
    def of_model(cls, folder: Path) -> "TensorFiles":
        """Open the weights in a model directory, in one file or in shards."""
        return cls(sorted(folder.glob("*.safetensors")) or [folder / MODEL_FILE])

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._owner.items()}

    def layout(self) -> Layout:
        return [
            (name, shape, TORCH_DTYPES[self._owner[name].get_slice(name).get_dtype()])
            for name, shape in self.shapes().items()
        ]

    def read(self, name: str, region: Region = ()) -> Tensor:
        """Read a tensor or a part of it."""
        if not region:
            return self[name]
        if any(part.start == part.stop for part in region):
            # A rank can hold no part of a small tensor.
            return torch.zeros([part.stop - part.start for part in region])
        part: Tensor = self._owner[name].get_slice(name)[region]
        return part

    def __getitem__(self, name: str) -> Tensor:
        return self._owner[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def __len__(self) -> int:
        return len(self._owner)


def write_tensors(path: Path, layout: Layout, tensors: Iterable[Tensor]) -> None:
    """Write a safetensors file from tensors that arrive one by one in the order of `layout`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, dtype in layout:
        start, end = end, end + _bytes(shape, dtype)
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def write_shards(
    folder: Path, layout: Layout, tensors: Iterable[Tensor], max_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write the weights of a model: one file, or shards of at most `max_bytes` with an index.

    A tensor that is larger than `max_bytes` is a separate shard.
    """
    shards = _split(layout, max_bytes)
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [MODEL_FILE]
    arriving = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        write_tensors(folder / name, shard, islice(arriving, len(shard)))
    assert next(arriving, None) is None, "every tensor has a place"
    if len(shards) > 1:
        sizes = [(torch.Size(shape).numel(), dtype.itemsize) for _, shape, dtype in layout]
        index = {
            "metadata": {
                "total_parameters": sum(count for count, _ in sizes),
                "total_size": sum(count * size for count, size in sizes),
            },
            "weight_map": {
                key: name for name, shard in zip(names, shards, strict=True) for key, *_ in shard
            },
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _split(layout: Layout, max_bytes: int) -> list[Layout]:
    shards: list[Layout] = [[]]
    size = 0
    for entry in layout:
        length = _bytes(*entry[1:])
        if shards[-1] and size + length > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += length
    return shards


def _bytes(shape: Shape, dtype: torch.dtype) -> int:
    return dtype.itemsize * torch.Size(shape).numel()
