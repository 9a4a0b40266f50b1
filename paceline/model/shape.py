"""Sizes of a decoder, read from its configuration, whatever that calls them."""

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class ModelShape:
    layers: int
    hidden: int
    mlp: int  # inner size of the MLP; with experts, of all that a token passes through
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


def model_shape(config: PretrainedConfig) -> ModelShape:
    text = config.get_text_config()

    def first(*names: str) -> int | None:
        values = (_size(text, name) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    expert = first("moe_intermediate_size", "intermediate_size") or 0
    experts = (first("num_experts_per_tok", "moe_topk") or 0) * expert
    inner = first("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    return ModelShape(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        mlp=max(inner or 4 * text.hidden_size, experts),
        heads=text.num_attention_heads,
        kv_heads=first("num_key_value_heads", "num_kv_heads") or text.num_attention_heads,
        head_dim=head_dim(text),
        vocabulary=text.vocab_size,
    )


def head_dim(config: PretrainedConfig) -> int:
    size: int | None = _size(config, "head_dim")
    return size or config.hidden_size // config.num_attention_heads


def _size(config: PretrainedConfig, name: str) -> Any:
    """Return a size, or None if there is none; the largest one if layers have different ones."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses the size of the whole model, as of Gemma 4
        return max(getattr(layer, name) for layer in config.per_layer_config)


def sliding_window(config: PretrainedConfig) -> int | None:
    """Return how far a token attends, or None if that is not limited."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    return getattr(config, "sliding_window", None)


def position_limit(config: PretrainedConfig) -> int | None:
    """Return the number of positions of a model with a position table instead of rotations."""
    text = config.get_text_config()
    if getattr(text, "rope_parameters", None):
        return None
    return getattr(text, "max_position_embeddings", None)
