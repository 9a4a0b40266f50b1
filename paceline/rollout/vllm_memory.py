"""What a model's weights are called and how large, and how much memory its keys and values may take, before vLLM is started."""

import os

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from paceline.model.shape import head_dim

BLOCK = 128  # tokens; vLLM gives memory out in blocks of at most this many
LEAST = 64 << 20


def expected_weights(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Every weight by its Hugging Face name, tied ones under each of their names."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def kv_bytes(
    config: PretrainedConfig,
    weights: dict[str, tuple[int, ...]],
    dtype: str,
    slots: int,
    max_length: int,
    fraction: float,
) -> int:
    """What all slots can use, but at most this fraction of what the weights leave free."""
    item = getattr(torch, dtype).itemsize
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = head_dim(config)
    blocks = slots * -(-max_length // BLOCK) + 2  # one is vLLM's own
    useful = blocks * BLOCK * 2 * config.num_hidden_layers * heads * size * item
    return max(LEAST, min(useful, int((_free_memory() - weight_bytes(weights, dtype)) * fraction)))


def weight_bytes(weights: dict[str, tuple[int, ...]], dtype: str) -> int:
    return (
        sum(torch.Size(shape).numel() for shape in weights.values())
        * getattr(torch, dtype).itemsize
    )


def memory_share(size: int) -> float:
    """Of the device's memory: what must be free for vLLM to start."""
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
