"""LoRA: the actor's weights stay as they are, small adapters beside them learn.

Nobody else needs to know of adapters: what leaves the engine are plain weights with the adapters added in, one tensor at
a time. The frozen weights are also the reference model, whenever the adapters are off.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paceline.errors import ConfigError, ModelError
from paceline.model.loading import model_body
from paceline.train.settings import LoraSettings, TrainSettings
from paceline.train.single import SingleDevice
from paceline.train.training_state import MODEL_FILE, write_tensors

ADAPTER = "default"  # peft's own name for the one adapter a layer has
FOLDER = "adapter"  # not beside the merged weights: transformers would take the whole folder for an adapter


class LoraDevice(SingleDevice):
    """A SingleDevice that trains adapters. A checkpoint holds them as a PEFT folder (`adapter/`), which is what a run goes on
    from, and the merged model beside it, for everybody else."""

    trained_file = f"{FOLDER}/adapter_model.safetensors"

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainSettings,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._config = add_adapters(model, settings.lora or LoraSettings(), seed)
        super().__init__(model, settings, temperature)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight of the base model under its Hugging Face name, with its adapter added in. Merged ones are new tensors."""
        yield from self.merged_weights().items()

    def merged_weights(self) -> "MergedWeights":
        return MergedWeights(self._model)

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Inside, the model is the base model."""
        for layer in adapted_layers(self._model).values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in adapted_layers(self._model).values():
                layer.enable_adapters(True)

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / FOLDER / "adapter_config.json").write_text(
            json.dumps(self._config, indent=1, sort_keys=True)
        )
        merged = self.merged_weights()
        base = {
            _base_name(name): p
            for name, p in self._model.named_parameters()
            if ".lora_" not in name
        }  # tied ones once
        layout = [(name, tuple(p.shape), p.dtype) for name, p in base.items()]
        write_tensors(folder / MODEL_FILE, layout, (merged[name] for name in base))

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        return {
            f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": p
            for name, p in trained.items()
        }  # as PEFT names them


class MergedWeights(Mapping[str, Tensor]):
    """The base model's weights by name, each computed when it is looked at: there is never a second model in memory."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._base = {
            _base_name(name): tensor
            for name, tensor in model.state_dict().items()
            if ".lora_" not in name
        }
        self._layers = adapted_layers(model)

    def __getitem__(self, name: str) -> Tensor:
        weight = self._base[name]
        layer = self._layers.get(name)
        if layer is None:
            return weight
        if weight.ndim != 2:  # of all experts
            return weight + layer.get_delta_weight(ADAPTER).detach()
        a, b = layer.lora_A[ADAPTER].weight.detach(), layer.lora_B[ADAPTER].weight.detach()
        if layer.fan_in_fan_out:  # kept as [in, out]
            a, b = b.t(), a.t()
        return torch.addmm(weight, b, a, alpha=layer.scaling[ADAPTER])

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def add_adapters(model: PreTrainedModel, settings: LoraSettings, seed: int) -> dict[str, Any]:
    """Put adapters into the model, which stays of its own class; they change nothing yet. Only they are left to train.
    Returns their PEFT configuration."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError(
            "train.lora is set, but the package peft is not installed: pip install 'paceline[lora]'"
        ) from None

    targets = _check_targets(model, settings.targets)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=targets,
        fan_in_fan_out=any(type(module) is Conv1D for module in model.modules()),
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
        inference_mode=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # the same adapters in every mode
        inject_adapter_in_model(config, model)
    written = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    return json.loads(json.dumps(written | {"inference_mode": True}, default=str))


def adapted_layers(model: PreTrainedModel) -> dict[str, Any]:
    """By the name of the weight they change."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    return {
        _base_name(f"{name}.{getattr(layer, 'parameter_name', 'weight')}"): layer
        for name, layer in layers.items()
    }


def _base_name(name: str) -> str:
    while ".base_layer." in name:  # experts have a layer around each of their tensors
        name = name.replace(".base_layer.", ".")
    return name


def _check_targets(model: PreTrainedModel, wanted: tuple[str, ...]) -> list[str]:
    """Names of linear layers inside the decoder; the output layer is not among them, since it is read without its module."""
    linear = {
        name.rpartition(".")[2]
        for name, module in model_body(model).named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    unknown = [name for name in wanted if name not in linear]
    if unknown:
        raise ConfigError(
            f"train.lora.targets names {', '.join(map(repr, unknown))}; {type(model).__name__} can have adapters at "
            f"{', '.join(sorted(linear))}"
        )
    if not linear:
        raise ModelError(
            f"{type(model).__name__} has no linear layers that could have adapters; unset train.lora"
        )
    return list(wanted) or sorted(linear)
