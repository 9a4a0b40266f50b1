"""Small random models for tests: no warm-up, made in milliseconds, the same every time."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from paceline.data.tiny import make_tokenizer


def random_model(folder: Path, *, hidden: int = 32, layers: int = 2, seed: int = 0) -> str:
    """A Qwen2-shape model with our character tokenizer, saved where `model = "<folder>"` finds it."""
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
