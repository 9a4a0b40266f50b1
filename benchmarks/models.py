"""The benchmark model: 0.8M-parameter Qwen2 shape, random weights, character tokenizer."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from paceline.data.tiny import make_tokenizer


def bench_model(directory: Path) -> str:
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)
