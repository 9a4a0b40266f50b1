"""A part of a model that computes like the whole: its first layers and rows of its vocabulary.

It shows whether an architecture can be trained without holding all weights on one rank.
"""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.model.hub_names import stored_tensors
from paceline.model.stored_weights import StoredWeights, allocate
from paceline.model.tensor_file import Region

ROWS = 128  # of every embedding: more than the checks of PackedModel use
NUMBERS = ("idx", "layer_id", "layer_number")  # attributes that count layers


def excerpt(
    model: PreTrainedModel,
    layers: Callable[[PreTrainedModel], nn.ModuleList],
    weights: StoredWeights,
    device: torch.device,
) -> PreTrainedModel:
    """Return a copy with the first layers, at least one of every kind, and their weights.

    `model` has no memory for its parameters; `layers` finds its decoder layers.
    """
    part = deepcopy(model)
    kept = layers(part)
    kinds = [_kind(layer) for layer in kept]
    del kept[1 + max(kinds.index(kind) for kind in kinds) :]
    text = part.config.get_text_config()
    text.vocab_size = min(ROWS, text.vocab_size)
    allocate(part, device, {id(parameter): ROWS for parameter in _vocabulary(part)})
    fill(part, weights)
    return part


def whole(model: PreTrainedModel, weights: StoredWeights, device: torch.device) -> PreTrainedModel:
    """Return a copy with all weights, for a model that does not run in parts."""
    copy = deepcopy(model)
    allocate(copy, device)
    fill(copy, weights)
    return copy


@torch.no_grad()
def fill(model: PreTrainedModel, weights: StoredWeights) -> None:
    """Copy stored weights into a model that can have fewer tensors and rows."""
    tensors = stored_tensors(model)

    def region(name: str) -> Region | None:
        own = tensors.get(name)
        return None if own is None else tuple(slice(0, size) for size in own.shape)

    for name, tensor in weights.read(region):
        tensors[name].copy_(tensor)


def _kind(layer: nn.Module) -> list[object]:
    """Return what a layer consists of, apart from its number and its weights."""
    return [
        (
            name,
            type(module),
            {key: p.shape for key, p in module._parameters.items() if p is not None},
            {
                key: value
                for key, value in vars(module).items()
                if isinstance(value, bool | int | float | str)
                and not any(number in key for number in NUMBERS)
            },
        )
        for name, module in layer.named_modules()
    ]


def _vocabulary(model: PreTrainedModel) -> list[Tensor]:
    """Return the parameters with a row per token or position."""
    found: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            found.append(module.weight)
            if module.padding_idx is not None and module.padding_idx >= ROWS:
                module.padding_idx = None
    output = model.get_output_embeddings()
    return found + ([*output.parameters()] if output is not None else [])
