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
from paceline.model.snapshot import current_snapshot

MODEL_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
MAX_MAPPED_BYTES = 2**24
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
    """The tensors of several safetensors files, in their order. A tensor is read on access."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.path = paths[0] if len(paths) == 1 else paths[0].parent
        self._owner: dict[str, _File] = {}
        for path in paths:
            file = _File(path)
            self._owner |= dict.fromkeys(file.names(), file)

    @classmethod
    def of_model(cls, folder: Path) -> "TensorFiles":
        """Open the weights in a model directory, in one file or in shards."""
        return cls(model_shards(folder) or [folder / MODEL_FILE])

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(self._slice(name).get_shape()) for name in self._owner}

    def layout(self) -> Layout:
        return [
            (name, shape, TORCH_DTYPES[self._slice(name).get_dtype()])
            for name, shape in self.shapes().items()
        ]

    def read(self, name: str, region: Region = ()) -> Tensor:
        """Read a tensor or a part of it."""
        if not region:
            return self[name]
        if any(part.start == part.stop for part in region):
            # A rank can hold no part of a small tensor.
            return torch.zeros([part.stop - part.start for part in region])
        part: Tensor = self._slice(name)[region]
        self._owner[name].count(part)
        return part

    def _slice(self, name: str) -> Any:
        return self._owner[name].open.get_slice(name)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._owner[name].open.get_tensor(name)
        self._owner[name].count(tensor)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._owner  # Mapping's method would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def __len__(self) -> int:
        return len(self._owner)


class _File:
    """A file that is reopened at intervals, because the pages read stay in memory until then."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self.open = self._opened()

    def names(self) -> list[str]:
        return list(self.open.offset_keys())

    def count(self, tensor: Tensor) -> None:
        """Note that this tensor was read."""
        self._read += tensor.nbytes
        if self._read > MAX_MAPPED_BYTES:
            self.open, self._read = self._opened(), 0

    def _opened(self) -> Any:
        try:
            return safe_open(self._path, "pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {self._path}: {error}") from error


def model_shards(folder: Path) -> list[Path]:
    """Return the safetensors files that make up the model in a directory."""
    index = folder / INDEX_FILE
    if index.exists():
        names = json.loads(index.read_text())["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    one = folder / MODEL_FILE
    return [one] if one.exists() else sorted(folder.glob("*.safetensors"))


def write_tensors(path: Path, layout: Layout, tensors: Iterable[Tensor]) -> None:
    """Write a safetensors file from tensors that arrive one by one in the order of `layout`.

    While a snapshot is taken, they are copied, and the file is complete when the snapshot is.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, dtype in layout:
        start, end = end, end + layout_bytes([(name, shape, dtype)])
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = len(text).to_bytes(8, "little") + text
    if snapshot := current_snapshot():
        return snapshot.add(path, text, end, tensors)
    with path.open("wb") as file:
        file.write(text)
        for tensor in tensors:
            file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is gathered


def write_shards(
    folder: Path, layout: Layout, tensors: Iterable[Tensor], max_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write the weights of a model: one file, or shards of at most `max_bytes` with an index.

    A tensor that is larger than `max_bytes` is a separate shard.
    """
    shards = split_layout(layout, max_bytes) or [[]]
    named = list(zip(file_names(len(shards)), shards, strict=True))
    arriving = iter(tensors)
    for name, shard in named:
        write_tensors(folder / name, shard, islice(arriving, len(shard)))
    assert next(arriving, None) is None, "every tensor has a place"
    if len(shards) > 1:
        write_index(folder, named)


def file_names(count: int, stem: str = "model") -> list[str]:
    """Return the names that Hugging Face gives to the files of a model."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def write_index(folder: Path, files: Sequence[tuple[str, Layout]]) -> None:
    """Write which file of a model has which tensors."""
    entries = [entry for _, layout in files for entry in layout]
    index = {
        "metadata": {
            "total_parameters": sum(torch.Size(shape).numel() for _, shape, _ in entries),
            "total_size": layout_bytes(entries),
        },
        "weight_map": {key: name for name, layout in files for key, *_ in layout},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def split_layout(layout: Layout, max_bytes: int = MAX_SHARD_BYTES) -> list[Layout]:
    """Divide tensors into files of at most `max_bytes`, in their order."""
    shards: list[Layout] = []
    size = 0
    for entry in layout:
        length = layout_bytes([entry])
        if not shards or size + length > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += length
    return shards


def layout_bytes(layout: Layout) -> int:
    return sum(dtype.itemsize * torch.Size(shape).numel() for _, shape, dtype in layout)
