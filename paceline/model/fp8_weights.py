"""A copy of a decoder's weights whose linear layers are FP8, for a rollout engine.

Embedding, output layer, norms and biases keep their dtype. `DecoderWeights.load` quantizes new
weights as it copies them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.model.fp8 import FP8, quantize
from paceline.model.weights import DecoderWeights, EngineWeights, Layer, Linear


def fp8_weights(weights: EngineWeights) -> DecoderWeights:
    if not isinstance(weights, DecoderWeights):
        raise ModelError(
            "rollout.weight_dtype = 'fp8': the native engine calls the module of this model; "
            "expected a model with a built-in forward pass (docs/engines.md). Remove the setting"
        )
    copy = _Copy(weights.named)
    layers = tuple(
        copy.layer(f"model.layers.{index}", layer) for index, layer in enumerate(weights.layers)
    )
    embedding = copy.single("model.embed_tokens.weight")
    tied = weights.head is weights.embedding
    return DecoderWeights(
        embedding,
        layers,
        copy.single("model.norm.weight"),
        embedding if tied else copy.single("lm_head.weight"),
        weights.inv_freq,
        weights.rope_scale,
        copy.named,
        copy.scales,
    )


class _Copy:
    def __init__(self, source: dict[str, Tensor]) -> None:
        self._source = source
        self.named: dict[str, Tensor] = {}
        self.scales: dict[str, Tensor] = {}  # by the name of the weight

    def single(self, name: str) -> Tensor:
        self.named[name] = self._source[name].clone()
        return self.named[name]

    def layer(self, prefix: str, layer: Layer) -> Layer:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        normed = layer.q_norm is not None
        return Layer(
            input_norm=self.single(f"{prefix}.input_layernorm.weight"),
            qkv=self._linear([f"{attention}.{part}_proj" for part in "qkv"]),
            q_norm=self.single(f"{attention}.q_norm.weight") if normed else None,
            k_norm=self.single(f"{attention}.k_norm.weight") if normed else None,
            out=self._linear([f"{attention}.o_proj"]),
            mlp_norm=self.single(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
            down=self._linear([f"{mlp}.down_proj"]),
        )

    def _linear(self, names: Sequence[str]) -> Linear:
        weights = [f"{name}.weight" for name in names]
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in self._source]
        matrices = [self._source[name] for name in weights]
        sizes, device = [len(matrix) for matrix in matrices], matrices[0].device
        fused = torch.empty(sum(sizes), matrices[0].shape[1], dtype=FP8, device=device)
        scale = torch.empty(sum(sizes), device=device)
        self.named |= zip(weights, fused.split(sizes), strict=True)
        self.scales |= zip(weights, scale.split(sizes), strict=True)
        for name, matrix in zip(weights, matrices, strict=True):
            quantize(matrix, self.named[name], self.scales[name])
        bias = torch.cat([self._source[name] for name in biases]) if biases else None
        if bias is not None:
            self.named |= zip(biases, bias.split(sizes), strict=True)
        return Linear(fused, bias, scale)
