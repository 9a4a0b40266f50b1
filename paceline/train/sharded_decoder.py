"""Our own forward and backward pass inside the modules that FSDP shards, for a policy trained on GPUs in bfloat16.

FSDP's hooks stay what they are: they gather a layer's weights before it is passed, and send its gradients on after the backward pass.
In between, `decoder.py` computes on the gathered weights, and adds gradients in float32 to what FSDP takes them from.
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
from paceline.train.decoder import LayerPasses, positions
from paceline.train.head import chunked_logprobs
from paceline.train.operations import Positions


class ShardedDecoder:
    """Computes in place of a causal language model and its layers, whose own `forward` it replaces."""

    def __init__(self, model: PreTrainedModel, passes: LayerPasses, temperature: float) -> None:
        self._model: Any = (
            model.eval()
        )  # in train mode transformers would wrap layers for recomputation: that is done here
        self._passes, self._temperature = passes, temperature
        for layer in self._model.model.layers:
            layer.forward = partial(_through, passes, layer)

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
            hidden, head.detach(), None, micro.targets, self._temperature, gradient=gradient
        )
        return TokenOutputs(logprobs=logprobs, entropy=entropy)


def _through(
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
    """What comes back is the gradient of the sum, changed where it lies: each layer is the only one to use what the one before made."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, passes: LayerPasses, module: nn.Module, at: Positions
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.kept, middle, after = passes.forward(_read(module, _weight), x, delta, at)
        ctx.passes, ctx.module, ctx.at, ctx.is_first = passes, module, at, delta is None
        return middle, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor, narrow: Tensor) -> tuple[Tensor | None, ...]:
        kept, ctx.kept = ctx.kept, None  # free it layer by layer
        narrow = ctx.passes.backward(
            _read(ctx.module, _weight), _read(ctx.module, _gradient), kept, ctx.at, d, narrow
        )
        return d, None if ctx.is_first else narrow, None, None, None


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
        d, narrow = ctx.passes.last_backward(
            ctx.weight, _gradient([ctx.weight]), total, ctx.predict, d_hidden
        )
        return d, narrow, None, None, None


def _read(module: Any, take: Callable[[Sequence[Tensor]], Tensor]) -> Layer:
    """A decoder layer in the layout of the passes. `take` makes one tensor of parameters that follow each other."""
    attention, mlp = module.self_attn, module.mlp

    def linear(*parts: nn.Linear) -> Linear:
        bias = None if parts[0].bias is None else take([part.bias for part in parts])
        return Linear(take([part.weight for part in parts]), bias)

    def norm(name: str) -> Tensor | None:
        return take([getattr(attention, name).weight]) if hasattr(attention, name) else None

    return Layer(
        input_norm=take([module.input_layernorm.weight]),
        qkv=linear(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        out=linear(attention.o_proj),
        mlp_norm=take([module.post_attention_layernorm.weight]),
        gate_up=linear(mlp.gate_proj, mlp.up_proj),
        down=linear(mlp.down_proj),
    )


def _weight(parameters: Sequence[Tensor]) -> Tensor:
    return parameters[0] if len(parameters) == 1 else torch.cat(tuple(parameters))


def _gradient(parameters: Sequence[Tensor]) -> Tensor:
    """Where the gradient of these parameters is added up, at least in float32. Each one's `grad` is its part; FSDP takes it from there."""
    first = parameters[0]
    shape = (sum(len(p) for p in parameters), *first.shape[1:])
    if first.grad is not None:  # of a pass before this one; the parts lie one after the other
        return first.grad.as_strided(shape, first.grad.stride())
    made = torch.zeros(
        shape, dtype=torch.promote_types(first.dtype, torch.float32), device=first.device
    )
    for parameter, part in zip(parameters, made.split([len(p) for p in parameters]), strict=True):
        parameter.grad_dtype = made.dtype
        parameter.grad = part
    return made
