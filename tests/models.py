"""Small random models for tests: deterministic, created in milliseconds."""

from pathlib import Path

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from paceline.data.tiny import make_tokenizer
from tests.architectures import tiny_architecture


def random_model(
    folder: Path, *, hidden: int = 32, layers: int = 2, seed: int = 0, padding: int = 0
) -> str:
    """Save a Qwen2 model with the character tokenizer; return its directory.

    `padding`: tokens of the model that the tokenizer does not have.
    """
    tokenizer = make_tokenizer()
    size = len(tokenizer) + padding
    return _save(Qwen2ForCausalLM, tokenizer, folder, hidden, layers, seed, vocab_size=size)


def random_other_model(folder: Path, name: str = "gpt2") -> str:
    """Save a model of another architecture, which generates through its module."""
    tokenizer = make_tokenizer()
    tiny_architecture(name, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def random_reward_model(
    folder: Path, *, labels: int = 1, seed: int = 0, chat_template: str | None = None
) -> str:
    """Save a Qwen2 model with one output per label."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template
    return _save(Qwen2ForSequenceClassification, tokenizer, folder, 32, 2, seed, num_labels=labels)


def _save(
    kind: type[PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    hidden: int,
    layers: int,
    seed: int,
    **more: int,
) -> str:
    config = Qwen2Config(
        vocab_size=more.pop("vocab_size", len(tokenizer)),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=kind is Qwen2ForCausalLM,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
