"""Conversion of a GGUF file to a Hugging Face directory: weights, config, tokenizer, chat template.

Tensors are read, dequantized and written one by one. Dequantized values are stored in float32: a
block's scale has 11 significant bits and is multiplied by a number of up to 8 bits, so bfloat16 (8
bits) and float16 (11 bits) would round them. Matrices in float16 or bfloat16 keep their dtype.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as names

from paceline.errors import ModelError
from paceline.model.creation import empty_model
from paceline.model.hub_names import HubFormat, stored_tensors
from paceline.model.loading import (
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    no_progress_bars,
    save_tokenizer,
)
from paceline.model.tensor_file import Layout, Shape, layout_bytes, write_shards

Progress = Callable[[int, int], None]
Named = Iterator[tuple[str, Tensor]]
ROWS = 256  # dequantized together
MAX_THREADS = 8
# Processors of transformers that convert each tensor by itself and keep its shape. Others combine
# tensors, such as those of experts: then transformers loads the model as a whole.
SEPARATE = ("TensorProcessor", "LlamaTensorProcessor", "Gemma2TensorProcessor")


def write_model(file: Path, folder: Path, progress: Progress | None = None) -> None:
    """Write a GGUF file as a Hugging Face directory. The directory must exist."""
    file = file.absolute()  # the same name as in transformers, or the file is read again
    with _read_once(), no_progress_bars():
        config = load_config(str(file))
        model = empty_model(config)
        form = HubFormat(model)
        layout, tensors = _separate_tensors(file, model) or _whole_model(file)
        stored = form.layout(layout)
        total = layout_bytes(stored)
        _check_space(folder, total)
        write_shards(folder, stored, _counted(form.to_files(tensors), total, progress))
        form.write_config(config, folder)
        save_tokenizer(load_tokenizer(str(file)), folder)
        load_generation_config(str(file)).save_pretrained(folder)


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """A reader that slices a plain array: slices of a memory map take several times as long."""

    @property
    def data(self) -> np.ndarray[Any, Any]:
        return self._array

    @data.setter
    def data(self, mapped: np.ndarray[Any, Any]) -> None:
        self._array = np.asarray(mapped)


@contextmanager
def _read_once() -> Iterator[None]:
    """Share what takes transformers seconds each time: the reader, and the names of tensors."""
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = lru_cache(_Reader), lru_cache(before[1])
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = before


def _separate_tensors(file: Path, model: PreTrainedModel) -> tuple[Layout, Named] | None:
    """Return the model's tensors, each read on demand; None if they cannot be read separately."""
    reader = gguf.GGUFReader(str(file))
    processor = _processor(reader, model.config)
    if type(processor).__name__ not in SEPARATE:
        return None
    known = names.get_gguf_hf_weights_map(model, processor)
    tensors = [(known[t.name], t) for t in reader.tensors if t.name in known]
    layout: Layout = [(n, tuple(map(int, t.shape[::-1])), _dtype(t)) for n, t in tensors]
    expected = {name: tuple(t.shape) for name, t in stored_tensors(model).items()}
    if {name: shape for name, shape, _ in layout} != expected:
        return None

    def read() -> Named:
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
            for (name, shape, dtype), (_, tensor) in zip(layout, tensors, strict=True):
                values = _dequantized(tensor, shape, threads)
                moved = processor.process(weights=values, name=tensor.name).weights
                yield name, torch.from_numpy(np.ascontiguousarray(moved)).to(dtype)

    return layout, read()


def _dequantized(tensor: Any, shape: Shape, threads: ThreadPoolExecutor) -> np.ndarray[Any, Any]:
    """Return a tensor in float32, computed in parts that fit in a CPU cache."""
    values = np.empty(shape, dtype=np.float32)

    def compute(start: int) -> None:
        part = slice(start, start + ROWS)
        values[part] = gguf.dequantize(tensor.data[part], tensor.tensor_type)

    # A vector has one part, because its blocks are not rows.
    if len(shape) > 1:
        list(threads.map(compute, range(0, shape[0], ROWS)))
    else:
        values[:] = gguf.dequantize(tensor.data, tensor.tensor_type)
    return values


def _whole_model(file: Path) -> tuple[Layout, Named]:
    """Return the tensors of the model that transformers loads; it needs memory for all of them."""
    tensors = stored_tensors(load_model(str(file), "float32"))
    layout: Layout = [(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    return layout, iter(tensors.items())


def _processor(reader: Any, config: PretrainedConfig) -> Any:
    architecture = reader.get_field("general.architecture").contents()
    kind = names.TENSOR_PROCESSORS.get(architecture, names.TensorProcessor)
    return kind(config=config.to_dict())


def _dtype(tensor: Any) -> torch.dtype:
    kind = {"F16": torch.float16, "BF16": torch.bfloat16}.get(tensor.tensor_type.name)
    return kind if kind and len(tensor.shape) > 1 else torch.float32


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"{folder.parent} has {free / 1e9:.1f} GB of free space; the converted model needs "
            f"{needed / 1e9:.1f} GB. Free some space, set PACELINE_CACHE to another directory, or "
            "choose one with `paceline model get`"
        )


def _counted(
    tensors: Iterable[tuple[str, Tensor]], total: int, progress: Progress | None
) -> Iterator[Tensor]:
    done = 0
    for _, tensor in tensors:
        yield tensor
        done += tensor.nbytes
        if progress:
            progress(done, total)
