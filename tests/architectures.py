"""Tiny random models of many architectures, each created in a fraction of a second."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": {},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
        "window_size": 6},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"new_decoder_architecture": True},
    "phi": {},
    "phi3": {"sliding_window": 6},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0},
    "gemma3_text": MIXED | {"head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 8,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4},
    "olmo2": {},
    "olmo3": MIXED,
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0},
    "granitemoehybrid": EXPERTS | {"layer_types": ["attention"] * 2, "mamba_n_heads": 8,
        "mamba_d_head": 8, "shared_intermediate_size": 16, "position_embedding_type": "rope"},
    "stablelm": {"use_qkv_bias": True},
    "cohere": {"logit_scale": 0.25},
    "cohere2": MIXED,
    "starcoder2": {"sliding_window": 6},
    "mixtral": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "phimoe": EXPERTS,
    "qwen3_moe": EXPERTS | {"head_dim": 8},
    "olmoe": EXPERTS,
    "ernie4_5_moe": EXPERTS | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "gpt_oss": EXPERTS | MIXED | {"head_dim": 8},
    "mistral": {"sliding_window": 6},  # has a fast path, but not for sequences beyond its window
    "llama4_text": EXPERTS | {"attention_chunk_size": 6, "intermediate_size_mlp": 48,
        "head_dim": 8, "no_rope_layers": [1, 0]},
    "deepseek_v3": EXPERTS | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}  # fmt: skip


def tiny_architecture(name: str, seed: int = 0, **more: Any) -> PreTrainedModel:
    config = CONFIG_MAPPING[name](**SHAPE | ARCHITECTURES[name] | more)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        )
        with torch.no_grad():  # norms and biases too, so that omitting one changes the result
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()
