"""Explicit forward and backward pass of a decoder, for training on a GPU without autograd.

It uses few, large operations, recomputes cheap activations and accumulates gradients in place.
Matmuls use a bfloat16 copy of the weights in the rollout engine's layout. The residual stream and
the gradients of all weights are float32.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from paceline.model.packing import MicroBatch
from paceline.model.shape import head_dim
from paceline.model.weights import DecoderWeights, Layer, Linear
from paceline.training.launches import LaunchLimit
from paceline.training.operations import Attended, Operations, Positions, Shape


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Intermediate results of a layer that its backward pass needs."""

    normed: Tensor
    qkv: Tensor  # before rotation, unless rotation is in place
    rotated: Tensor
    attended: Attended
    middle: Tensor  # residual stream after attention
    normed_middle: Tensor
    gate_up: Tensor


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """A layer's input and, unless recomputed, its intermediate results, for the backward pass."""

    start: Tensor
    inside: LayerActivations | None


class LayerPasses:
    """The steps of a forward and backward pass; the caller passes the weights.

    Forward, a layer gets and returns the residual stream and a delta that is not yet added to it.
    Backward, it gets and returns the gradient of the residual stream in float32 (`d`) and in the
    compute dtype (`d_cast`).
    """

    def __init__(
        self,
        config: PretrainedConfig,
        recomputes: bool = False,
        operations: Operations | None = None,
    ) -> None:
        self.recomputes = recomputes
        shape = Shape(
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim(config),
            config.rms_norm_eps,
        )
        self._do = operations or Operations(shape)

    def embed(self, ids: Tensor, embedding: Tensor) -> Tensor:
        x = torch.nn.functional.embedding(ids, embedding)
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def forward(
        self, layer: Layer, x: Tensor, delta: Tensor | None, at: Positions
    ) -> tuple[SavedActivations, Tensor, Tensor]:
        """Run one layer; return saved activations, residual stream after attention and delta."""
        start, normed = self._do.add_norm(x, delta, layer.input_norm)
        inside, middle, after = self._inside(layer, start, normed, at)
        return SavedActivations(start, None if self.recomputes else inside), middle, after

    def backward(
        self,
        layer: Layer,
        to: Layer,
        saved: SavedActivations,
        at: Positions,
        d: Tensor,
        d_cast: Tensor,
    ) -> Tensor:
        """Turn `d`, the gradient of the layer's output, into that of its input, in place.

        Adds the gradients of the weights to `to` and returns the new `d_cast`.
        """
        start, inside = saved.start, saved.inside
        if inside is None:
            inside, _, _ = self._inside(
                layer, start, self._do.add_norm(start, None, layer.input_norm)[1], at
            )
        d_gate_up = inside.gate_up
        active = self._do.silu_mul_backward(d_gate_up, d_cast @ layer.down.weight)
        _add_gradient(to.down, d_cast, active)
        _add_gradient(to.gate_up, d_gate_up, inside.normed_middle)
        d_cast = self._do.norm_backward(
            inside.middle, layer.mlp_norm, d_gate_up @ layer.gate_up.weight, d, to.mlp_norm
        )
        _add_gradient(to.out, d_cast, inside.attended[0])
        d_qkv = self._do.attend_backward(
            d_cast @ layer.out.weight, inside.rotated, inside.attended, at
        )
        norms = self._do.rotate_backward(d_qkv, inside.qkv, at, layer.q_norm, layer.k_norm)
        if norms is not None and to.q_norm is not None and to.k_norm is not None:
            to.q_norm.add_(norms[0])
            to.k_norm.add_(norms[1])
        _add_gradient(to.qkv, d_qkv, inside.normed)
        return self._do.norm_backward(
            start, layer.input_norm, d_qkv @ layer.qkv.weight, d, to.input_norm
        )

    def last(
        self, norm: Tensor, x: Tensor, delta: Tensor, predict: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the final residual stream, and its norm where it predicts a trained token."""
        total, normed = self._do.add_norm(x, delta, norm)
        return total, normed.index_select(0, predict)

    def last_backward(
        self, norm: Tensor, to: Tensor, total: Tensor, predict: Tensor, d_hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        d_normed = torch.zeros_like(total).index_add_(0, predict, d_hidden.to(total.dtype))
        d = torch.zeros_like(total)
        return d, self._do.norm_backward(total, norm, d_normed, d, to)

    def _inside(
        self, layer: Layer, x: Tensor, normed: Tensor, at: Positions
    ) -> tuple[LayerActivations, Tensor, Tensor]:
        qkv = layer.qkv(normed)
        rotated = self._do.rotate(qkv, at, layer.q_norm, layer.k_norm)
        attended = self._do.attend(rotated, at)
        middle, normed_middle = self._do.add_norm(x, layer.out(attended[0]), layer.mlp_norm)
        gate_up = layer.gate_up(normed_middle)
        delta = layer.down(self._do.silu_mul(gate_up))
        # Save a detached tensor: an autograd function that saves its own output leaks memory.
        saved = middle.detach()
        inside = LayerActivations(normed, qkv, rotated, attended, saved, normed_middle, gate_up)
        return inside, middle, delta


@dataclass(slots=True)
class Tape:
    """Saved results of a forward pass for the backward pass."""

    positions: Positions
    layers: list[SavedActivations] = field(default_factory=list)
    last: Tensor | None = None  # input of the final norm


class TrainDecoder:
    """Forward and backward pass of all layers, with the weights on one device."""

    def __init__(self, passes: LayerPasses, weights: DecoderWeights) -> None:
        self.weights = weights
        self.passes = passes
        self.limit: LaunchLimit | None = None

    def start(self, micro: MicroBatch) -> Tape:
        return Tape(positions(micro, self.weights.inv_freq, self.weights.rope_scale))

    @torch.no_grad()
    def forward(self, micro: MicroBatch, tape: Tape, keep: bool) -> Tensor:
        """Return the normed hidden states [M, hidden] at positions that predict a trained token.

        `keep` saves activations for a backward pass.
        """
        x = self.passes.embed(micro.input_ids[0], self.weights.embedding)
        delta: Tensor | None = None
        for layer in self.weights.layers:
            saved, x, delta = self.passes.forward(layer, x, delta, tape.positions)
            if keep:
                tape.layers.append(saved)
            del saved
            self._layer_launched()
        assert delta is not None, "the decoder has at least one layer"
        x, hidden = self.passes.last(self.weights.norm, x, delta, micro.predict)
        tape.last = x if keep else None
        return hidden

    @torch.no_grad()
    def backward(self, micro: MicroBatch, tape: Tape, d_hidden: Tensor, to: DecoderWeights) -> None:
        """Add the gradients of all weights except the head's to `to`; consumes the tape."""
        assert tape.last is not None, "call forward with keep=True first"
        d, d_cast = self.passes.last_backward(
            self.weights.norm, to.norm, tape.last, micro.predict, d_hidden
        )
        for layer, gradient in zip(reversed(self.weights.layers), reversed(to.layers), strict=True):
            d_cast = self.passes.backward(
                layer, gradient, tape.layers.pop(), tape.positions, d, d_cast
            )
            self._layer_launched()
        to.embedding.index_add_(0, micro.input_ids[0], d)

    def _layer_launched(self) -> None:
        if self.limit is not None:
            self.limit.layer_launched()


def positions(micro: MicroBatch, inv_freq: Tensor, rope_scale: float) -> Positions:
    rows = micro.layout.varlen
    assert rows is not None, "micro-batches on a GPU have a varlen layout"
    angles = micro.position_ids[0].float()[:, None] * inv_freq.to(micro.position_ids.device)
    return Positions(angles.cos() * rope_scale, angles.sin() * rope_scale, rows)


def _add_gradient(to: Linear, d_out: Tensor, x: Tensor) -> None:
    """Add the gradient of a linear layer's weights to `to`, accumulated in float32."""
    add_matmul(to.weight, d_out.t(), x)
    if to.bias is not None:
        to.bias.add_(d_out.sum(0, dtype=to.bias.dtype))


def add_matmul(to: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute to += a @ b, where `to` can have a wider dtype."""
    dtype: dict[str, Any] = {"out_dtype": to.dtype} if a.dtype != to.dtype else {}
    torch.addmm(to, a, b, out=to, **dtype)
