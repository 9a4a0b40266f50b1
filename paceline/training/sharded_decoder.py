"""Explicit forward and backward pass for FSDP-sharded policies on GPUs in bfloat16.

FSDP's hooks gather a layer's weights before its forward and backward pass and reduce its gradients
afterwards. In between, the passes of `decoder.py` compute with the gathered weights and accumulate
float32 gradients in `grad`, where FSDP reads them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from paceline.algo.loss import TokenOutputs
from paceline.model.packing import MicroBatch
from paceline.model.weights import Layer, Linear
from paceline.training.decoder import LayerPasses, positions
from paceline.training.head import chunked_logprobs
from paceline.training.operations import Positions


class ShardedDecoder:
    """Replacement for the forward pass of a causal language model and of its layers."""

    def __init__(self, model: PreTrainedModel, passes: LayerPasses, temperature: float) -> None:
        # In train mode transformers would wrap layers for recomputation, which `passes` does.
        self._model: Any = model.eval()
        self._passes, self._temperature = passes, temperature
        for layer in self._model.model.layers:
            layer.forward = partial(_layer_forward, passes, layer)

    def for_model(self, model: PreTrainedModel) -> "ShardedDecoder":
        """Return the same passes for another model of the architecture."""
        return type(self)(model, self._passes, self._temperature)

    def __call__(self, micro: MicroBatch) -> TokenOutputs:
        body, head = self._model.model, self._model.lm_head.weight
        at = positions(
            micro, body.rotary_emb.inv_freq.float(), float(body.rotary_emb.attention_scaling)
        )
        x = _Embedding.apply(body.embed_tokens.weight, self._passes, micro.input_ids[0])
        delta: Tensor | None = None
        for layer in body.layers:
            x, delta = layer(x, delta, at)
        hidden = _LastNorm.apply(x, delta, self._passes, body.norm.weight, micro.predict)
        gradient = _gradient([head]) if torch.is_grad_enabled() else None
        logprobs, entropy = chunked_logprobs(
            hidden,
            head.detach(),
            None,
            micro.targets,
            self._temperature,
            gradient=gradient,
            keep=not self._passes.recomputes,
        )
        return TokenOutputs(logprobs=logprobs, entropy=entropy)


def _layer_forward(
    passes: LayerPasses, module: nn.Module, x: Tensor, delta: Tensor | None, at: Positions
) -> tuple[Tensor, Tensor]:
    middle, after = _LayerPass.apply(x, delta, passes, module, at)
    return middle, after


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, passes: LayerPasses, ids: Tensor) -> Tensor:
        ctx.weight, ctx.ids = weight, ids
        return passes.embed(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[None, ...]:
        _gradient([ctx.weight]).index_add_(0, ctx.ids, d)
        return None, None, None


class _LayerPass(torch.autograd.Function):
    """One decoder layer.

    The backward pass changes the gradient of the residual stream in place, because no other layer
    uses it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        passes: LayerPasses,
        module: nn.Module,
        at: Positions,
    ) -> tuple[Tensor, Tensor]:
        ctx.saved, middle, after = passes.forward(_layer(module, _weight), x, delta, at)
        ctx.passes, ctx.module, ctx.at, ctx.is_first = passes, module, at, delta is None
        return middle, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor, d_cast: Tensor) -> tuple[Tensor | None, ...]:
        saved, ctx.saved = ctx.saved, None  # free the activations layer by layer
        weights, gradients = _layer(ctx.module, _weight), _layer(ctx.module, _gradient)
        d_cast = ctx.passes.backward(weights, gradients, saved, ctx.at, d, d_cast)
        return d, None if ctx.is_first else d_cast, None, None, None


class _LastNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor,
        passes: LayerPasses,
        weight: nn.Parameter,
        predict: Tensor,
    ) -> Tensor:
        ctx.passes, ctx.weight, ctx.predict = passes, weight, predict
        ctx.total, hidden = passes.last(weight, x, delta, predict)
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_hidden: Tensor) -> tuple[Tensor | None, ...]:
        total, ctx.total = ctx.total, None
        d, d_cast = ctx.passes.last_backward(
            ctx.weight, _gradient([ctx.weight]), total, ctx.predict, d_hidden
        )
        return d, d_cast, None, None, None


def _layer(module: Any, fuse: Callable[[Sequence[Tensor]], Tensor]) -> Layer:
    """Return a decoder layer in the layout of the passes; `fuse` makes one tensor of several."""
    attention, mlp = module.self_attn, module.mlp

    def linear(*parts: nn.Linear) -> Linear:
        bias = None if parts[0].bias is None else fuse([part.bias for part in parts])
        return Linear(fuse([part.weight for part in parts]), bias)

    def norm(name: str) -> Tensor | None:
        return fuse([getattr(attention, name).weight]) if hasattr(attention, name) else None

    return Layer(
        input_norm=fuse([module.input_layernorm.weight]),
        qkv=linear(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        out=linear(attention.o_proj),
        mlp_norm=fuse([module.post_attention_layernorm.weight]),
        gate_up=linear(mlp.gate_proj, mlp.up_proj),
        down=linear(mlp.down_proj),
    )


def _weight(parameters: Sequence[Tensor]) -> Tensor:
    return parameters[0] if len(parameters) == 1 else torch.cat(tuple(parameters))


def _gradient(parameters: Sequence[Tensor]) -> Tensor:
    """Return the tensor that accumulates the gradients of these parameters, at least in float32.

    Each parameter's `grad` is a slice of it, where FSDP reads it.
    """
    first = parameters[0]
    shape = (sum(len(p) for p in parameters), *first.shape[1:])
    if first.grad is not None:  # from an earlier pass; the slices are contiguous
        return first.grad.as_strided(shape, first.grad.stride())
    dtype = torch.promote_types(first.dtype, torch.float32)
    fused = torch.zeros(shape, dtype=dtype, device=first.device)
    for parameter, part in zip(parameters, fused.split([len(p) for p in parameters]), strict=True):
        parameter.grad_dtype = dtype
        parameter.grad = part
    return fused
