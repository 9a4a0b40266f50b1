"""Weights of a model in safetensors files, for a module that gets its memory after sharding."""

import re
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.errors import CheckpointError
from paceline.model.creation import empty_model
from paceline.model.hub_names import (
    HubFormat,
    float32_parts,
    is_quantized,
    stored_tensors,
)
from paceline.model.loading import load_config, load_model
from paceline.model.source import model_files, model_source
from paceline.model.tensor_file import INDEX_FILE, Region, TensorFiles, model_shards

READERS = 8  # threads


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The files of a causal language model and its tensors' names in them."""

    files: TensorFiles
    form: HubFormat
    names: dict[str, str]  # name in the whole model: name in the trained module

    def part(self, model: PreTrainedModel, body: PreTrainedModel) -> "StoredWeights":
        """Return the weights of a part of the model, such as its body."""
        whole = {id(tensor): name for name, tensor in stored_tensors(model).items()}
        names = {whole[id(tensor)]: name for name, tensor in stored_tensors(body).items()}
        return StoredWeights(self.files, self.form, names)

    def read(self, region: Callable[[str], Region | None]) -> Iterator[tuple[str, Tensor]]:
        """Read tensors by their name in the trained module: of each, what `region` returns.

        Tensors for which it returns None are left out.
        """

        def wanted(name: str) -> Region | None:
            return region(self.names[name]) if name in self.names else None

        for name, tensor in self.form.from_files(self.files, wanted):
            yield self.names[name], tensor


def open_stored(name: str) -> tuple[PreTrainedModel, StoredWeights] | None:
    """Return a model without memory for its parameters, and its weights in files.

    Returns None for weights that only transformers can convert: in other formats, quantized, with
    other names or with two values for a tied weight. `load_model` loads these as a whole.
    """
    paths, config = safetensors_files(name), load_config(name)
    if not paths or is_quantized(config):
        return None
    config.dtype = "float32"
    try:
        files, model = TensorFiles(paths), empty_model(config)
    except (CheckpointError, ValueError):
        return None
    form, shapes = HubFormat(model), files.shapes()
    own = stored_tensors(model)
    tied = model.state_dict().keys() - own.keys()
    expected = form.stored_shapes()
    if tied & shapes.keys() or any(shapes.get(key) != shape for key, shape in expected.items()):
        return None
    _initialize_buffers(model)
    return model.eval(), StoredWeights(files, form, {key: key for key in own})


def load_onto(name: str, device: torch.device) -> PreTrainedModel:
    """Load a model in float32 onto a device, without a copy in host memory where possible.

    Several threads read its files, and the device converts what they read.
    """
    opened = open_stored(name)
    if opened is None:
        return load_model(name).to(device)
    model, weights = opened
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    allocate(model, device)
    with ThreadPoolExecutor(READERS) as threads:
        list(threads.map(partial(_fill, stored_tensors(model), weights), _shares(weights)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return model


@torch.no_grad()
def _fill(tensors: dict[str, Tensor], weights: StoredWeights, names: Container[str]) -> None:
    for name, tensor in weights.read(lambda name: () if name in names else None):
        tensors[name].copy_(tensor.to(tensors[name].device))  # before the dtype changes


def _shares(weights: StoredWeights) -> list[set[str]]:
    """Divide the names of all tensors by size; those that are converted together stay together."""
    shapes, form = weights.form.shapes, weights.form
    groups = {form.group(name): 0 for name in weights.names}
    for name in weights.names:
        groups[form.group(name)] += torch.Size(shapes[name]).numel()
    shares: list[set[str]] = [set() for _ in range(READERS)]
    sizes = [0] * READERS
    for group, size in sorted(groups.items(), key=lambda item: -item[1]):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += size
        shares[smallest] |= set(group)
    return shares


def open_empty(name: str, dtype: str, device: torch.device) -> PreTrainedModel | None:
    """Return a model with memory for its weights, which the caller sets; None as `open_stored`."""
    opened, number = open_stored(name), getattr(torch, dtype)
    if opened is None:
        return None
    model, wide = opened[0], float32_parts(opened[0].config, number)
    for key, parameter in model.named_parameters():
        if not any(re.search(part, key) for part in wide):
            parameter.data = parameter.data.to(number)
    model.config.dtype = dtype
    allocate(model, device)
    return model


def safetensors_files(name: str) -> list[Path]:
    """Return a model's safetensors files, downloaded if necessary; an empty list without any."""
    files = model_files(model_source(name))
    if files.gguf:
        return []
    if files.is_local:
        return model_shards(Path(files.name))
    from huggingface_hub import snapshot_download

    patterns = ["model*.safetensors", INDEX_FILE]
    try:
        return model_shards(Path(snapshot_download(files.name, allow_patterns=patterns)))
    except Exception:  # `load_model` tries again and reports the failure
        return []


def allocate(
    model: PreTrainedModel, device: torch.device, rows: Mapping[int, int] | None = None
) -> None:
    """Give the tensors of a model memory; tied parameters stay tied.

    `rows`: the largest number of rows of some parameters, by their `id`.
    """
    made: dict[int, tuple[Tensor, nn.Parameter]] = {}  # with the old tensor, or its id is reused
    for module in model.modules():
        for key, old in module._parameters.items():
            if old is None:
                continue
            if id(old) not in made:
                size = min(len(old), (rows or {}).get(id(old), len(old))) if old.ndim else 0
                shape = (size, *old.shape[1:]) if old.ndim else old.shape
                new = torch.empty(shape, dtype=old.dtype, device=device)
                made[id(old)] = old, nn.Parameter(new, requires_grad=False)
            module._parameters[key] = made[id(old)][1]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = (
                    torch.empty_like(buffer, device=device)
                    if buffer.is_meta
                    else buffer.to(device, copy=True)
                )


def _initialize_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that files do not hold, such as rotary frequencies."""
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
        module._is_hf_initialized = False
    model.initialize_weights()
