"""Tiny reward model: a Qwen2 with random weights and one score, created on first use.

It stands in for a trained reward model where a placement is tried. Its scores mean nothing, but
they are reproducible and differ between completions, so a policy can learn to raise them.
"""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

from paceline import __version__
from paceline.data.tiny import cached_model, make_tokenizer
from paceline.model.loading import save_tokenizer

SCALE = 15.0  # brings the scores of different completions about 1 apart


def resolve_reward_model(name: str) -> str:
    """Return the directory of the built-in reward model for "tiny", else `name`."""
    return str(cached_model(f"tiny-reward-{__version__}", _build)) if name == "tiny" else name


def _build(folder: Path) -> None:
    tokenizer = make_tokenizer()
    save_tokenizer(tokenizer, folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForSequenceClassification(_config(tokenizer))
    with torch.no_grad():
        model.score.weight.mul_(SCALE)
    model.save_pretrained(folder)


def _config(tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        num_labels=1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
