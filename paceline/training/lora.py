"""LoRA train engine: the actor's weights are frozen, and small adapters are trained.

Adapters stay inside this engine: it exports plain weights, merged with the adapters one tensor at a
time. With the adapters disabled, the frozen weights also serve as the reference model.
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
from paceline.model.hub_names import TensorFormat, stored_tensors
from paceline.model.loading import default_device, load_model, model_body
from paceline.model.tensor_file import TensorFiles, write_tensors
from paceline.training.checkpoint import ADAPTER
from paceline.training.optimizer import optimizer_state
from paceline.training.settings import LoraSettings, TrainSettings
from paceline.training.single import SingleDevice
from paceline.training.training_state import (
    layout_of,
    load_training,
    role_of,
    save_optimizer,
    write_model,
)

NAME = "default"  # PEFT's name for a layer's only adapter
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class LoraDevice(SingleDevice):
    """A SingleDevice that trains adapters.

    A checkpoint holds the adapters in PEFT format (`adapter/`), from which a run resumes, and the
    merged model for all other uses.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainSettings,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._config = add_adapters(model, settings.lora or LoraSettings(), seed)
        super().__init__(model, settings, temperature)

    @classmethod
    def open_with_adapters(
        cls, model_path: str, settings: TrainSettings, temperature: float, seed: int
    ) -> "LoraDevice":
        return cls(load_model(model_path).to(default_device()), settings, temperature, seed)

    def rollout_weights(self, max_length: int, copy: bool) -> None:
        """Return None: the parameters with adapters are not what an engine reads."""

    def current_weights(self) -> "MergedWeights":
        return MergedWeights(self._model)

    named_weights = current_weights

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight of the base model by Hugging Face name, merged with its adapter.

        Merged weights are new tensors.
        """
        yield from MergedWeights(self._model).items()

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Disable the adapters inside the context, so that the model is the base model."""
        for layer in adapted_layers(self._model).values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in adapted_layers(self._model).values():
                layer.enable_adapters(True)

    def save(self, folder: Path) -> None:
        to, merged = folder / role_of(self._head), MergedWeights(self._model)
        base = {
            _base_name(name): tensor
            for name, tensor in stored_tensors(self._model).items()
            if ".lora_" not in name
        }
        layout = layout_of(base)
        write_model(to, self._form, self._model.config, layout, (merged[name] for name in base))
        adapter = to / ADAPTER
        trained = (p.detach() for p in self._parameters.values())
        write_tensors(adapter / WEIGHTS, layout_of(self._parameters), trained)
        (adapter / CONFIG).write_text(json.dumps(self._config, indent=1, sort_keys=True))
        save_optimizer(folder, self._head, optimizer_state(self._optimizer, self._parameters))

    def load(self, folder: Path) -> None:
        files = TensorFiles([folder / role_of(self._head) / ADAPTER / WEIGHTS])
        form = TensorFormat(self._parameters)
        load_training(
            folder, self._head, files, form, self._parameters, self._parameters, self._optimizer
        )
        self._loaded()

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the adapters' parameters by the names that PEFT writes."""
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        return {
            f"base_model.model.{name.replace(f'.{NAME}.', '.')}": p for name, p in trained.items()
        }


class MergedWeights(Mapping[str, Tensor]):
    """Merged weights by name. Each is computed on access, so no second model is in memory."""

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
        if weight.ndim != 2:  # one tensor holds the weights of all experts
            return weight + layer.get_delta_weight(NAME).detach()
        a, b = layer.lora_A[NAME].weight.detach(), layer.lora_B[NAME].weight.detach()
        if layer.fan_in_fan_out:  # the weight is stored as [in, out]
            a, b = b.t(), a.t()
        return torch.addmm(weight, b, a, alpha=layer.scaling[NAME])

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def add_adapters(model: PreTrainedModel, settings: LoraSettings, seed: int) -> dict[str, Any]:
    """Add adapters to the model in place, freeze all other weights, return the PEFT configuration.

    The model keeps its class and, until the adapters are trained, its outputs.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError(
            "train.lora is set, but the package peft is not installed; run "
            "pip install 'paceline[lora]'"
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
        torch.manual_seed(seed)  # every mode starts with the same adapters
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            raise ConfigError(
                f"train.lora.targets = {targets}: PEFT cannot add these adapters to "
                f"{type(model).__name__} ({str(error).rstrip('.')}); name other layers, or remove "
                "the setting to adapt all"
            ) from error
    written = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    return json.loads(json.dumps(written | {"inference_mode": True}, default=str))


def adapted_layers(model: PreTrainedModel) -> dict[str, Any]:
    """Return the layers that have an adapter, by the name of the adapted weight."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    return {
        _base_name(f"{name}.{getattr(layer, 'parameter_name', 'weight')}"): layer
        for name, layer in layers.items()
    }


def _base_name(name: str) -> str:
    while ".base_layer." in name:  # nested for experts: one wrapper per tensor
        name = name.replace(".base_layer.", ".")
    return name


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> list[str]:
    """Return the names of the linear layers that get an adapter.

    The output layer cannot have one, because training uses its weight without calling its module.
    """
    linear = {
        name.rpartition(".")[2]
        for name, module in model_body(model).named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not _is_router(module)
    }
    unknown = [name for name in targets if name not in linear]
    if unknown:
        raise ConfigError(
            f"train.lora.targets contains {', '.join(map(repr, unknown))}; expected linear layers "
            f"of {type(model).__name__}: {', '.join(sorted(linear))}"
        )
    if not linear:
        raise ModelError(
            f"{type(model).__name__} has no linear layers for adapters; remove train.lora"
        )
    return list(targets) or sorted(linear)


def _is_router(module: nn.Module) -> bool:
    """Return whether a linear layer selects experts: it returns more than a linear layer does."""
    return type(module).__name__.endswith("Router")
