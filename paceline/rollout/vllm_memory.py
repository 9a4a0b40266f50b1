"""Names and sizes of a model's weights, and the size of vLLM's KV cache, before vLLM starts."""

import os

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from paceline.model.shape import head_dim

BLOCK = 128  # tokens; vLLM allocates the KV cache in blocks of at most this size
MIN_BYTES = 64 << 20


def expected_weights(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by Hugging Face name; tied weights have several names."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def kv_bytes(
    config: PretrainedConfig,
    weights: int,
    dtype: str,
    slots: int,
    max_length: int,
    fraction: float,
    tensor_parallel: int = 1,
) -> int:
    """Return the KV cache size of a rank for all slots.

    It is at most `fraction` of what the `weights` (bytes of the rank) leave free.
    """
    item = getattr(torch, dtype).itemsize
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads, size = max(1, heads // tensor_parallel), head_dim(config)
    blocks = slots * -(-max_length // BLOCK) + 2  # vLLM reserves one
    useful = blocks * BLOCK * 2 * config.num_hidden_layers * heads * size * item
    return max(MIN_BYTES, min(useful, int((_free_memory() - weights) * fraction)))


def weight_bytes(weights: dict[str, tuple[int, ...]], dtype: str) -> int:
    return (
        sum(torch.Size(shape).numel() for shape in weights.values())
        * getattr(torch, dtype).itemsize
    )


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
