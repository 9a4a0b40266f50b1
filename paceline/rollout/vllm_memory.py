"""Names and sizes of a model's weights, and the size of vLLM's KV cache, before vLLM starts."""

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from paceline.errors import ConfigError
from paceline.model.creation import empty_model
from paceline.model.shape import head_dim

BLOCK = 128  # tokens; vLLM allocates the KV cache in blocks of at most this size
MIN_BYTES = 64 << 20


class Split(NamedTuple):
    """How the ranks of an engine share the model."""

    tensor: int = 1  # ranks that share every layer
    pipeline: int = 1  # stages that share the layers

    def check(self, config: PretrainedConfig) -> None:
        """Raise ConfigError if the model cannot be divided like this."""
        for name, parts, count, of in (
            ("tensor", self.tensor, config.num_attention_heads, "attention heads"),
            # Stages of one size have the same number of KV blocks, so that all schedule alike.
            ("pipeline", self.pipeline, config.num_hidden_layers, "layers"),
        ):
            if count % parts:
                raise ConfigError(
                    f"rollout.{name}_parallel = {parts}: the model has {count} {of}; expected a "
                    "divisor of it"
                )


def expected_weights(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by Hugging Face name; tied weights have several names."""
    weights = empty_model(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def kv_bytes(
    config: PretrainedConfig,
    weights: int,
    dtype: str,
    slots: int,
    max_length: int,
    fraction: float,
    split: Split,
) -> int:
    """Return the KV cache size of a rank for all slots.

    It is at most `fraction` of what the `weights` (bytes of the rank) leave free.
    """
    useful = full_kv_bytes(config, dtype, slots, max_length, split)
    return max(MIN_BYTES, min(useful, int((_free_memory() - weights) * fraction)))


def full_kv_bytes(
    config: PretrainedConfig, dtype: str, slots: int, max_length: int, split: Split
) -> int:
    """Return the size of a rank's blocks for the longest sequence in each slot."""
    item = getattr(torch, dtype).itemsize
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads, size = max(1, heads // split.tensor), head_dim(config)
    layers = config.num_hidden_layers // split.pipeline
    blocks = slots * -(-max_length // BLOCK) + 2  # vLLM reserves one
    return blocks * BLOCK * 2 * layers * heads * size * item


def weight_bytes(
    weights: Mapping[str, tuple[int, ...]], dtype: str, split: Split, fp8: bool = False
) -> int:
    """Return the size of the weights of the rank that has the most. `fp8`: those of the layers."""
    item = getattr(torch, dtype).itemsize
    layers = root = largest = 0
    for name, shape in weights.items():
        count = torch.Size(shape).numel()
        if any(part.isdigit() for part in name.split(".")):
            layers += count
        else:
            root, largest = root + count, max(largest, count)
    # The first stage has the embedding, and the last one the output layer.
    size = layers // split.pipeline * (1 if fp8 else item)
    size += (root if split.pipeline == 1 else largest) * item
    return size // split.tensor


def memory_fraction(size: int) -> float:
    """Return the fraction of the device's memory that must be free for vLLM to start."""
    total = (
        torch.cuda.mem_get_info()[1]
        if torch.cuda.is_available()
        else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    return min(0.95, size / total)


def _free_memory() -> int:
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
