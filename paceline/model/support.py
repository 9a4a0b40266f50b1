"""Which models the native engine can generate with, and which of them its fast path supports."""

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from paceline.errors import ModelError
from paceline.model.shape import head_dim, sliding_window

FAST = ("llama", "mistral", "qwen2", "qwen3")
ALTERNATIVE = "rollout.engine = 'vllm' may support it"
HEAD_DIMS = (16, 32, 64, 128, 256)  # that the kernels for GPUs support
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
CHANGING_ROPE = ("dynamic", "longrope")  # depends on the longest sequence of a forward pass
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


def check_fast(config: PretrainedConfig) -> None:
    """Raise ModelError for an architecture that the hand-written forward pass does not support."""
    if config.model_type not in FAST:
        raise ModelError(f"model_type {config.model_type!r} is not one of {', '.join(FAST)}")
    if config.hidden_act != "silu":
        raise ModelError(f"hidden_act {config.hidden_act!r} is not 'silu'")
    rope = config.rope_parameters["rope_type"]
    if rope not in STATIC_ROPE:
        raise ModelError(f"rope_type {rope!r} is not one of {', '.join(STATIC_ROPE)}")


def is_fast(config: PretrainedConfig, max_length: int) -> bool:
    """Return whether the hand-written forward pass supports sequences of this length."""
    try:
        check_fast(config)
    except ModelError:
        return False
    window = sliding_window(config)
    return window is None or max_length <= window


def trains_fast(config: PretrainedConfig) -> bool:
    """Return whether the explicit passes of training support the architecture, on a GPU."""
    return is_fast(config, 0) and sliding_window(config) is None and head_dim(config) in HEAD_DIMS


def can_recompute(config: PretrainedConfig) -> bool:
    """Return whether the model of transformers can recompute its activations."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def check_generates(config: PretrainedConfig, max_length: int) -> None:
    """Raise ModelError for a model or a sequence length that the native engine does not support."""
    kind, text = config.model_type, config.get_text_config()
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None or config.is_encoder_decoder:
        raise ModelError(
            f"model_type {kind!r} is not a causal language model: use a decoder-only text model"
        )
    layers = set(getattr(text, "layer_types", None) or ())
    other = sorted(layers - set(ATTENTION))
    # Some hybrid architectures have models with attention in all layers, such as Granite 4.0.
    if other or (getattr(model, "_is_stateful", False) and not layers):
        raise ModelError(
            f"model_type {kind!r} keeps more than a KV cache ({', '.join(other) or 'a state'}), "
            f"which the native engine does not support; {ALTERNATIVE}, or use a model with "
            "attention only"
        )
    total = "data.max_prompt_length + rollout.max_response_length"
    kept = getattr(text, "keep_window_size", None)  # Doge: beyond it, tokens see later ones
    if kept is not None and max_length > kept:
        raise ModelError(
            f"model_type {kind!r} attends to later tokens in sequences of more than {kept} tokens "
            f"(keep_window_size): {total} = {max_length} must not exceed that"
        )
    check_rope(config, max_length, total, ALTERNATIVE)


def check_rope(config: PretrainedConfig, longest: int, name: str, action: str) -> None:
    """Raise ModelError if rotary frequencies depend on the other sequences of a batch.

    A sequence would have other log-probs when a longer one is in the same forward pass. The
    longest one has `longest` tokens, which the message calls `name`.
    """
    limit = rope_limit(config.get_text_config())
    if limit is not None and longest > limit:
        raise ModelError(
            f"model_type {config.model_type!r} changes its position encoding when a sequence of "
            f"the batch is longer than {limit} tokens: {name} = {longest} must not exceed that; "
            f"{action}"
        )


def rope_limit(text: PretrainedConfig) -> int | None:
    """Return the length up to which rotary frequencies are constant, or None if they always are."""
    rope = getattr(text, "rope_parameters", None) or {}
    # Some models have parameters for each kind of layer.
    parts = [rope] if "rope_type" in rope else [p for p in rope.values() if isinstance(p, dict)]
    limits = [
        part.get("original_max_position_embeddings") or text.max_position_embeddings
        for part in parts
        if part.get("rope_type") in CHANGING_ROPE
    ]
    return min(limits, default=None)
