"""Names and shapes of a model's tensors in Hugging Face files, converted from and to the module's.

transformers renames and fuses some tensors when it loads a model: the experts of a layer, for
example, are one tensor in memory and many in the files. `HubFormat` reverses this with the function
that `save_pretrained` uses, one layer at a time, so that files have the names every tool reads.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from paceline.model.creation import empty_model
from paceline.model.tensor_file import Layout, Region, Shape, TensorFiles

Named = Mapping[str, Tensor]


class TensorFormat:
    """Tensors stored under their names in memory, such as a critic's."""

    def __init__(self, tensors: Named) -> None:
        self.shapes: dict[str, Shape] = {name: tuple(t.shape) for name, t in tensors.items()}
        self._renamed = {name: name for name in tensors}  # stored as they are, under another name
        self._groups: dict[str, tuple[str, ...]] = {}  # converted together with others of a layer

    def write_config(self, config: PretrainedConfig, folder: Path) -> None:
        config.save_pretrained(folder)

    def to_files(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert tensors in memory to those in files; hold those of one layer at a time."""
        waiting: dict[tuple[str, ...], dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in tensors:
            if name in self._renamed:
                yield self._renamed[name], tensor
                continue
            group = self._groups[name]
            # Gathered on a device one by one, converted in host memory.
            waiting[group][name] = tensor if tensor.is_meta else tensor.cpu()
            if len(waiting[group]) == len(group):
                yield from self._convert(waiting.pop(group)).items()

    def group(self, name: str) -> tuple[str, ...]:
        """Return the tensors in memory that must be converted together with this one."""
        return self._groups.get(name, (name,))

    def stored_shapes(self) -> dict[str, Shape]:
        """Return the names and shapes of all tensors in files."""
        stored = self.layout((name, shape, torch.float32) for name, shape in self.shapes.items())
        return {name: shape for name, shape, _ in stored}

    def layout(self, tensors: Iterable[tuple[str, Shape, torch.dtype]]) -> Layout:
        """Return what `to_files` yields for such tensors, in its order."""
        empty = ((n, torch.empty(s, dtype=dtype, device="meta")) for n, s, dtype in tensors)
        return [(name, tuple(t.shape), t.dtype) for name, t in self.to_files(empty)]

    def from_files(
        self, files: TensorFiles, region: Callable[[str], Region | None]
    ) -> Iterator[tuple[str, Tensor]]:
        """Read tensors by their name in memory: of each, the part that `region` returns.

        Tensors for which it returns None are left out. Files are read from front to back.
        """
        names = {stored: name for name, stored in self._renamed.items()}
        for stored in files:
            part = region(names[stored]) if stored in names else None
            if part is not None:
                yield names[stored], files.read(stored, part)
        for group in dict.fromkeys(self._groups.values()):
            parts = {name: region(name) for name in group}
            if all(part is None for part in parts.values()):
                continue
            for name, tensor in self._restore(group, files).items():
                part = parts[name]
                if part is not None:
                    yield name, tensor[part].clone() if part else tensor

    def _restore(self, group: tuple[str, ...], files: TensorFiles) -> dict[str, Tensor]:
        """Invert the conversion, which only moves elements, by converting their indices."""
        shapes = {name: torch.Size(self.shapes[name]) for name in group}
        sizes = [shape.numel() for shape in shapes.values()]
        indices = torch.arange(sum(sizes)).split(sizes)
        stored = self._convert(
            {n: i.view(shape) for (n, shape), i in zip(shapes.items(), indices, strict=True)}
        )
        flat = torch.empty(sum(sizes), dtype=files[next(iter(stored))].dtype)
        for name, index in stored.items():
            flat[index.reshape(-1)] = files[name].reshape(-1)
        return {
            n: part.view(shape)
            for (n, shape), part in zip(shapes.items(), flat.split(sizes), strict=True)
        }

    def _convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors


class HubFormat(TensorFormat):
    """Tensors stored under the names of the Hugging Face files that the model was loaded from."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Read class, configuration and loading history of a model before it is changed."""
        with torch.device("meta"):
            self._model: PreTrainedModel = type(model)(deepcopy(model.config))
        # None is the default conversion of the architecture. The history of quantized files would
        # quantize the trained weights again.
        history = getattr(model, "_weight_conversions", None)
        self._model._weight_conversions = None if is_quantized(model.config) else history
        tensors = stored_tensors(self._model)
        super().__init__(tensors)
        stored = self._convert(tensors)
        names = {id(tensor): name for name, tensor in tensors.items()}
        self._renamed = {names[id(t)]: key for key, t in stored.items() if id(t) in names}
        moved = {name: t for name, t in tensors.items() if name not in self._renamed}
        layers: dict[str, tuple[str, ...]] = defaultdict(tuple)
        for name in moved:
            layers[_layer(name)] += (name,)
        by_layer = [self._convert({n: moved[n] for n in group}) for group in layers.values()]
        shapes = {name: t.shape for layer in by_layer for name, t in layer.items()}
        expected = {name: t.shape for name, t in stored.items() if id(t) not in names}
        groups = layers.values() if shapes == expected else [tuple(moved)]
        self._groups = {name: group for group in groups for name in group}

    @classmethod
    def of_config(cls, config: PretrainedConfig) -> "HubFormat":
        return cls(empty_model(config))

    def write_config(self, config: PretrainedConfig, folder: Path) -> None:
        config = deepcopy(config)
        config.architectures = [type(self._model).__name__]
        config.dtype = "float32"
        if is_quantized(config):
            del config.quantization_config
        config.save_pretrained(folder)

    def _convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        converted: dict[str, Tensor] = revert_weight_conversion(self._model, dict(tensors))
        return converted


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return what a checkpoint holds: parameters (tied ones once) and persistent buffers."""
    return dict(model.named_parameters()) | persistent_buffers(model)


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    state = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in state}


def float32_parts(config: PretrainedConfig, dtype: torch.dtype) -> tuple[str, ...]:
    """Return patterns of the tensors that transformers keeps in float32 in a model of `dtype`."""
    model, names = empty_model(config), set[str]()
    if dtype != torch.float32:
        names |= set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        names |= set(model._keep_in_fp32_modules or ())
    return tuple(sorted(name.replace("*", ".*") for name in names))


def is_quantized(config: PretrainedConfig) -> bool:
    return getattr(config, "quantization_config", None) is not None


def _layer(name: str) -> str:
    """Return the part of a tensor's name up to the first number."""
    found = re.match(r".*?\.\d+\.", name)
    return found.group() if found else ""
