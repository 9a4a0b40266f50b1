"""Safetensors files read tensor by tensor: a rank that needs a part never holds the whole model."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import CheckpointError


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of several safetensors files by name, read on access."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._owner: dict[str, Any] = {}
        for path in paths:
            try:
                file = safe_open(path, "pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"cannot read {path}: {error}") from error
            self._owner |= dict.fromkeys(file.keys(), file)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._owner.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._owner[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def __len__(self) -> int:
        return len(self._owner)
