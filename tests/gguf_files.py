"""Small GGUF files for tests. Import this module only where the package gguf is installed."""

from pathlib import Path

import gguf
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.data.tiny import make_tokenizer
from paceline.model.loading import load_model
from tests.models import random_model

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "lm_head": "output",
}


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: str = "F32",
    architecture: str = "qwen2",
) -> None:
    """Write a model with matrices of a type of GGUF, such as Q8_0, and vectors in float32."""
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    # The format requires at least one merge.
    tokens = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "ab"]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for transformers_name, gguf_name in NAMES.items():
            name = name.replace(transformers_name, gguf_name)
        number = gguf.GGMLQuantizationType[kind if tensor.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quantize(tensor.numpy(), number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_gguf(file: Path, kind: str = "Q8_0", seed: int = 0) -> Path:
    """Write a small model with random weights; return the file."""
    folder = file.parent / f"{file.stem}-original"
    random_model(folder, hidden=64, seed=seed)
    with torch.no_grad():
        write_gguf(file, load_model(str(folder)), make_tokenizer(), kind)
    return file
