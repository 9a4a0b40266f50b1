"""The benchmark model: 0.8M-parameter Qwen2 shape, random weights, character tokenizer.

Other sizes change single values of the shape.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from paceline.data.tiny import make_tokenizer

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def bench_model(directory: Path, **shape: int) -> str:
    tokenizer = make_tokenizer()
    sizes: dict[str, Any] = SHAPE | shape
    config = Qwen2Config(
        **sizes,
        vocab_size=len(tokenizer),
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
