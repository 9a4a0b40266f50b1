"""Shapes of well-known models, to plan a run before the model is downloaded."""

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from paceline.errors import ModelError

# Layers, hidden size, MLP size, heads, key-value heads, tied embeddings (Qwen2.5).
QWEN = {
    "0.5b": (24, 896, 4864, 14, 2, True),
    "1.5b": (28, 1536, 8960, 12, 2, True),
    "3b": (36, 2048, 11008, 16, 2, True),
    "7b": (28, 3584, 18944, 28, 4, False),
    "14b": (48, 5120, 13824, 40, 8, False),
    "32b": (64, 5120, 27648, 40, 8, False),
}
VOCABULARY = {"7b": 152064, "14b": 152064, "32b": 152064}
SHAPES = (*QWEN, "70b")


def known_shape(name: str) -> PretrainedConfig:
    """Return the configuration of a Qwen2.5 model of this size, or of Llama 3 with 70B."""
    name = name.lower()
    if name == "70b":
        return LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            max_position_embeddings=8192,
        )
    if name not in QWEN:
        raise ModelError(f"shape {name!r} is not known; expected one of {', '.join(SHAPES)}")
    layers, hidden, mlp, heads, kv_heads, tied = QWEN[name]
    return Qwen2Config(
        vocab_size=VOCABULARY.get(name, 151936),
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
    )
