"""Copies of a model's weight files in another dtype and in other shards, tensor by tensor."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.model.hub_names import float32_parts
from paceline.model.loading import load_config
from paceline.model.tensor_file import Layout, TensorFiles, write_shards, write_tensors


def recast_model(source: Path, to: Path, dtype: str, max_shard_bytes: int) -> None:
    """Write weights and config.json of a model directory in `dtype`.

    Tensors that transformers keeps in float32 stay float32.
    """
    number = getattr(torch, dtype)
    layout, tensors = _recast(
        TensorFiles.of_model(source), number, float32_parts(load_config(str(source)), number)
    )
    write_shards(to, layout, tensors, max_shard_bytes)
    config = json.loads((source / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(_with_dtype(config, dtype), indent=2) + "\n")


def recast_file(source: Path, to: Path, dtype: str) -> None:
    write_tensors(to, *_recast(TensorFiles([source]), getattr(torch, dtype)))


def _recast(
    files: TensorFiles, dtype: torch.dtype, wide: tuple[str, ...] = ()
) -> tuple[Layout, Iterator[Tensor]]:
    def target(name: str, found: torch.dtype) -> torch.dtype:
        if not found.is_floating_point:
            return found
        return torch.float32 if any(re.search(part, name) for part in wide) else dtype

    layout = [(name, shape, target(name, found)) for name, shape, found in files.layout()]
    return layout, (files[name].to(number) for name, _, number in layout)


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Set the dtype in a configuration and in those nested in it."""
    nested = {
        key: _with_dtype(value, dtype) for key, value in config.items() if isinstance(value, dict)
    }
    return config | nested | ({"dtype": dtype} if "dtype" in config else {})
