"""Hugging Face weights to Megatron's layout and back.

Megatron fuses q, k and v by key head, and gate and up by rank; pads the vocabulary; splits over tensor-parallel ranks; numbers the
layers of each pipeline stage from 0. A `Slot` is one Megatron parameter and knows which Hugging Face tensors it is made of. What
holds for weights holds for everything of their shape, so optimizer state goes the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, cat
from transformers import PretrainedConfig

from paceline.model.weights import head_dim
from paceline.train.packed import Head

Kind = Literal["whole", "rows", "columns", "vocabulary", "qkv", "gate_up"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterMapping:
    stage: int
    name: str  # of the parameter in its stage's module
    parts: dict[str, Shape]  # Hugging Face tensors in it, whole
    kind: Kind
    groups: int  # key heads: queries are fused with the key they look at
    copy: bool = False  # of another slot's weight, on another stage

    def split(self, full: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        """This rank's part of the Hugging Face tensors, in Megatron's layout."""
        if self.kind == "whole":
            return full[0]
        if self.kind == "columns":
            return full[0].chunk(ranks, 1)[rank]
        if self.kind == "gate_up":
            return cat([part.chunk(ranks)[rank] for part in full])
        if self.kind == "qkv":
            by_group = [part.view(self.groups, -1, *part.shape[1:]) for part in full]
            return cat(by_group, 1).chunk(ranks)[rank].flatten(0, 1)
        rows = full[0]
        if self.kind == "vocabulary":
            rows = F.pad(rows, (0, 0, 0, padded_vocabulary(len(rows), ranks) - len(rows)))
        return rows.chunk(ranks)[rank]

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The Hugging Face tensors from all ranks' parts."""
        if self.kind == "whole":
            return [shards[0]]
        if self.kind == "columns":
            return [cat(list(shards), 1)]
        if self.kind == "gate_up":
            return [
                cat(list(halves))
                for halves in zip(*(shard.chunk(2) for shard in shards), strict=True)
            ]
        rows = cat(list(shards))
        if self.kind == "qkv":
            sizes = [shape[0] // self.groups for shape in self.parts.values()]
            by_group = rows.view(self.groups, -1, *rows.shape[1:]).split(sizes, 1)
            return [part.flatten(0, 1) for part in by_group]
        (shape,) = self.parts.values()
        return [rows[: shape[0]]]


def padded_vocabulary(size: int, ranks: int) -> int:
    return -(-size // ranks) * ranks


def slots(config: PretrainedConfig, stages: int, head: Head) -> list[ParameterMapping]:
    """Every parameter of every stage, in the order Hugging Face has them. A critic's are named as its backbone alone names them."""
    prefix = "model." if head == "policy" else ""
    vocabulary: Shape = (config.vocab_size, config.hidden_size)
    groups = config.num_key_value_heads
    embedding = {f"{prefix}embed_tokens.weight": vocabulary}
    found = [
        ParameterMapping(0, "embedding.word_embeddings.weight", embedding, "vocabulary", groups)
    ]
    per_stage = config.num_hidden_layers // stages
    for layer in range(config.num_hidden_layers):
        stage, local = divmod(layer, per_stage)
        for name, parts, kind in _layer(config):
            theirs = {f"{prefix}layers.{layer}.{part}": shape for part, shape in parts.items()}
            found.append(
                ParameterMapping(stage, f"decoder.layers.{local}.{name}", theirs, kind, groups)
            )
    last = stages - 1
    found.append(
        ParameterMapping(
            last,
            "decoder.final_layernorm.weight",
            {f"{prefix}norm.weight": (config.hidden_size,)},
            "whole",
            groups,
        )
    )
    if head == "value":
        found.append(
            ParameterMapping(
                last,
                "value_head.linear.weight",
                {"value_head.weight": (1, config.hidden_size)},
                "whole",
                groups,
            )
        )
        found.append(
            ParameterMapping(
                last, "value_head.linear.bias", {"value_head.bias": (1,)}, "whole", groups
            )
        )
    elif not config.tie_word_embeddings:
        found.append(
            ParameterMapping(
                last, "output_layer.weight", {"lm_head.weight": vocabulary}, "vocabulary", groups
            )
        )
    elif stages > 1:
        found.append(
            ParameterMapping(
                last, "output_layer.weight", embedding, "vocabulary", groups, copy=True
            )
        )
    return found


def _layer(config: PretrainedConfig) -> list[tuple[str, dict[str, Shape], Kind]]:
    hidden, inner, size = config.hidden_size, config.intermediate_size, head_dim(config)
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    projections = {"q": queries, "k": keys, "v": keys}
    layer: list[tuple[str, dict[str, Shape], Kind]] = [
        (
            "self_attention.linear_qkv.weight",
            {f"self_attn.{name}_proj.weight": (rows, hidden) for name, rows in projections.items()},
            "qkv",
        ),
        (
            "self_attention.linear_proj.weight",
            {"self_attn.o_proj.weight": (hidden, queries)},
            "columns",
        ),
        (
            "mlp.linear_fc1.weight",
            {"mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden)},
            "gate_up",
        ),
        ("mlp.linear_fc2.weight", {"mlp.down_proj.weight": (hidden, inner)}, "columns"),
        ("input_layernorm.weight", {"input_layernorm.weight": (hidden,)}, "whole"),
        ("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": (hidden,)}, "whole"),
    ]
    if config.model_type == "qwen2":
        biases: dict[str, Shape] = {
            f"self_attn.{name}_proj.bias": (rows,) for name, rows in projections.items()
        }
        layer.append(("self_attention.linear_qkv.bias", biases, "qkv"))
    if config.model_type == "qwen3":
        layer += [
            (
                f"self_attention.{name}_layernorm.weight",
                {f"self_attn.{name}_norm.weight": (size,)},
                "whole",
            )
            for name in "qk"
        ]
    return layer
