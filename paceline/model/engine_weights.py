"""The weights of a Hugging Face model as the native rollout engine reads them.

The engine's fast forward pass reads `DecoderWeights`; for every other model it calls the module
itself, whose tensors are `ModuleWeights`. `engine_weights` chooses between the two.
"""

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.errors import ModelError
from paceline.model.attention import PACKED
from paceline.model.support import is_fast
from paceline.model.weights import DecoderWeights, EngineWeights, load_by_name


def engine_weights(
    model: PreTrainedModel, share: bool, max_length: int, dtype: torch.dtype | None = None
) -> EngineWeights:
    """Return the weights as the fastest engine for this model and sequence length reads them.

    With `share`, they are views of the module's memory, whose parameters may only be changed in
    place from then on. Otherwise they are a copy, in `dtype` if one is given.
    """
    if is_fast(model.config, max_length):
        try:
            return DecoderWeights.from_module(model, share, dtype)
        except ModelError:
            pass  # a known model_type with a different layout
    return ModuleWeights(model, share, dtype)


class ModuleWeights:
    """A Hugging Face module and its tensors by name."""

    def __init__(
        self, model: PreTrainedModel, share: bool, dtype: torch.dtype | None = None
    ) -> None:
        self.module = model if share else copy.deepcopy(model).requires_grad_(False)
        # Without packed rows this is plain attention, with logit caps and attention sinks.
        self.module.set_attn_implementation(PACKED)
        if dtype is not None and not share:
            # Buffers keep their dtype: rotary frequencies need the precision.
            for parameter in self.module.parameters():
                parameter.data = parameter.data.to(dtype)
        self.named = {
            name: parameter.detach() for name, parameter in self.module.named_parameters()
        }
        self._known = {
            name for name, _ in self.module.named_parameters(remove_duplicate=False)
        } | set(self.module.state_dict())
        self._buffers = {
            name: buffer for name, buffer in self.module.named_buffers() if name in self._known
        }

    @property
    def vocabulary(self) -> int:
        return self.module.get_input_embeddings().weight.shape[0]

    @property
    def device(self) -> torch.device:
        return next(iter(self.named.values())).device

    def load(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        load_by_name(self.named, tensors, self._known, self._buffers)
