"""Conversion between Hugging Face weights and Megatron's layout.

Megatron fuses q, k and v by key head and gate and up by rank, pads the vocabulary, splits weights
over tensor-parallel ranks and numbers the layers of each pipeline stage from 0. A
`ParameterMapping` maps one Megatron parameter to its Hugging Face tensors. Optimizer state has the
same shapes and is converted the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, cat
from transformers import PretrainedConfig

from paceline.model.shape import head_dim
from paceline.model.tensor_file import Region
from paceline.training.packed import Head

Kind = Literal["replicated", "rows", "columns", "vocabulary", "qkv", "gate_up"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterMapping:
    stage: int
    name: str  # name of the parameter in the module of its stage
    parts: dict[str, Shape]  # full shapes of its Hugging Face tensors
    kind: Kind
    groups: int  # number of key heads; each is fused with its queries
    copy: bool = False  # whether it is a copy of a weight on another stage

    def regions(self, rank: int, ranks: int) -> dict[str, Region]:
        """Return the part of each Hugging Face tensor that a rank's shard consists of."""
        return {name: self._region(shape, rank, ranks) for name, shape in self.parts.items()}

    def _region(self, shape: Shape, rank: int, ranks: int) -> Region:
        if self.kind == "replicated":
            return ()
        region, axis = [slice(0, size) for size in shape], int(self.kind == "columns")
        size = -(-shape[axis] // ranks)  # only a vocabulary is not divisible
        start = min(size * rank, shape[axis])
        region[axis] = slice(start, min(start + size, shape[axis]))
        return tuple(region)

    def fuse(self, parts: Sequence[Tensor], ranks: int) -> Tensor:
        """Return a rank's shard in Megatron's layout, given its parts of Hugging Face tensors."""
        if self.kind == "gate_up":
            return cat(list(parts))
        if self.kind == "qkv":
            groups = self.groups // ranks
            return cat([part.view(groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)
        (part,) = parts
        padding = self.shard_shape(ranks)[0] - len(part) if self.kind == "vocabulary" else 0
        return F.pad(part, (0, 0, 0, padding)) if padding else part

    def shard_shape(self, ranks: int) -> Shape:
        """Return the shape of a rank's shard."""
        rows, *columns = zip(*self.parts.values(), strict=True)
        height, width = sum(rows), [sizes[0] for sizes in columns]
        if self.kind == "columns":
            return height, width[0] // ranks
        return height if self.kind == "replicated" else -(-height // ranks), *width

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the Hugging Face tensors, given the shards of all ranks."""
        if self.kind == "replicated":
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


def parameter_mappings(config: PretrainedConfig, stages: int, head: Head) -> list[ParameterMapping]:
    """Return the mappings of all parameters of all stages, in the order of Hugging Face.

    The names of a critic's weights have no "model." prefix, as in its backbone.
    """
    prefix = "model." if head == "policy" else ""
    vocabulary: Shape = (config.vocab_size, config.hidden_size)
    groups = config.num_key_value_heads
    embedding = {f"{prefix}embed_tokens.weight": vocabulary}
    mappings = [
        ParameterMapping(0, "embedding.word_embeddings.weight", embedding, "vocabulary", groups)
    ]
    per_stage = config.num_hidden_layers // stages
    for layer in range(config.num_hidden_layers):
        stage, local = divmod(layer, per_stage)
        for name, parts, kind in _layer(config):
            tensors = {f"{prefix}layers.{layer}.{part}": shape for part, shape in parts.items()}
            mappings.append(
                ParameterMapping(stage, f"decoder.layers.{local}.{name}", tensors, kind, groups)
            )
    last = stages - 1
    mappings.append(
        ParameterMapping(
            last,
            "decoder.final_layernorm.weight",
            {f"{prefix}norm.weight": (config.hidden_size,)},
            "replicated",
            groups,
        )
    )
    if head == "value":
        mappings.append(
            ParameterMapping(
                last,
                "value_head.linear.weight",
                {"value_head.weight": (1, config.hidden_size)},
                "replicated",
                groups,
            )
        )
        mappings.append(
            ParameterMapping(
                last, "value_head.linear.bias", {"value_head.bias": (1,)}, "replicated", groups
            )
        )
    elif not config.tie_word_embeddings:
        mappings.append(
            ParameterMapping(
                last, "output_layer.weight", {"lm_head.weight": vocabulary}, "vocabulary", groups
            )
        )
    elif stages > 1:
        mappings.append(
            ParameterMapping(
                last, "output_layer.weight", embedding, "vocabulary", groups, copy=True
            )
        )
    return mappings


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
        ("input_layernorm.weight", {"input_layernorm.weight": (hidden,)}, "replicated"),
        ("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": (hidden,)}, "replicated"),
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
                "replicated",
            )
            for name in "qk"
        ]
    return layer
