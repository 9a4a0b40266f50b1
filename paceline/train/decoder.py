"""A decoder's forward and backward pass written out, for training on a GPU: few and large operations, nothing kept that is cheap to
make again, gradients added where they belong.

Products are computed on a narrow copy of the weights, laid out as the rollout engine reads them. The sum that runs from layer to layer
and the gradients of all weights are float32.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from paceline.model.packing import MicroBatch
from paceline.model.shape import head_dim
from paceline.model.weights import DecoderWeights, Layer, Linear
from paceline.train.operations import Attended, Operations, Positions, Shape


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """What a layer makes on its way, and its backward pass needs."""

    normed: Tensor
    qkv: Tensor  # before rotation, if that is not done in place
    rotated: Tensor
    attended: Attended
    middle: Tensor  # the sum after attention
    normed_middle: Tensor
    gate_up: Tensor


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """What a layer keeps for its backward pass: its input, and the rest unless that is to be computed again."""

    start: Tensor
    inside: LayerActivations | None


class LayerPasses:
    """The parts of a forward and backward pass, over weights that come with the call. Between layers go a sum and what is still to be
    added to it; backwards the gradient of the sum, and the same in the type of products."""

    def __init__(
        self,
        config: PretrainedConfig,
        checkpointing: bool = False,
        operations: Operations | None = None,
    ) -> None:
        self._checkpointing = checkpointing
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
        """Through one layer: what to keep, the sum after attention, and what is still to be added to it."""
        start, normed = self._do.add_norm(x, delta, layer.input_norm)
        inside, middle, after = self._inside(layer, start, normed, at)
        return SavedActivations(start, None if self._checkpointing else inside), middle, after

    def backward(
        self,
        layer: Layer,
        to: Layer,
        kept: SavedActivations,
        at: Positions,
        d: Tensor,
        narrow: Tensor,
    ) -> Tensor:
        """`d`, of the layer's output, becomes that of its input; `narrow` is the same in the type of products, and what is returned.
        Gradients of the weights are added to `to`."""
        start, inside = kept.start, kept.inside
        if inside is None:
            inside, _, _ = self._inside(
                layer, start, self._do.add_norm(start, None, layer.input_norm)[1], at
            )
        d_gate_up = inside.gate_up
        active = self._do.silu_mul_backward(d_gate_up, narrow @ layer.down.weight)
        _add(to.down, narrow, active)
        _add(to.gate_up, d_gate_up, inside.normed_middle)
        narrow = self._do.norm_backward(
            inside.middle, layer.mlp_norm, d_gate_up @ layer.gate_up.weight, d, to.mlp_norm
        )
        _add(to.out, narrow, inside.attended[0])
        d_qkv = self._do.attend_backward(
            narrow @ layer.out.weight, inside.rotated, inside.attended, at
        )
        norms = self._do.rotate_backward(d_qkv, inside.qkv, at, layer.q_norm, layer.k_norm)
        if norms is not None and to.q_norm is not None and to.k_norm is not None:
            to.q_norm.add_(norms[0])
            to.k_norm.add_(norms[1])
        _add(to.qkv, d_qkv, inside.normed)
        return self._do.norm_backward(
            start, layer.input_norm, d_qkv @ layer.qkv.weight, d, to.input_norm
        )

    def last(
        self, norm: Tensor, x: Tensor, delta: Tensor, predict: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The sum after all layers, and its norm where that predicts a trained token."""
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
        # The sum is kept under a name of its own: autograd may mark the other one as made here, and whoever keeps what it made never goes.
        return (
            LayerActivations(
                normed, qkv, rotated, attended, middle.detach(), normed_middle, gate_up
            ),
            middle,
            delta,
        )


@dataclass(slots=True)
class Tape:
    """What a forward pass leaves for the backward pass."""

    positions: Positions
    layers: list[SavedActivations] = field(default_factory=list)
    last: Tensor | None = None  # what the last norm saw


class TrainDecoder:
    """All layers, on weights that one device holds."""

    def __init__(self, passes: LayerPasses, weights: DecoderWeights) -> None:
        self.weights = weights
        self._passes = passes

    def start(self, micro: MicroBatch) -> Tape:
        return Tape(positions(micro, self.weights.inv_freq, self.weights.rope_scale))

    @torch.no_grad()
    def forward(self, micro: MicroBatch, tape: Tape, keep: bool) -> Tensor:
        """[M, hidden] the last hidden states of the tokens that predict a trained one, normed. `keep`: a backward pass will follow."""
        x = self._passes.embed(micro.input_ids[0], self.weights.embedding)
        delta: Tensor | None = None
        for layer in self.weights.layers:
            kept, x, delta = self._passes.forward(layer, x, delta, tape.positions)
            if keep:
                tape.layers.append(kept)
            del kept
        assert delta is not None, "there is a layer"
        x, hidden = self._passes.last(self.weights.norm, x, delta, micro.predict)
        tape.last = x if keep else None
        return hidden

    @torch.no_grad()
    def backward(self, micro: MicroBatch, tape: Tape, d_hidden: Tensor, to: DecoderWeights) -> None:
        """Add the gradients of all weights but the head's to `to`; uses up the tape."""
        assert tape.last is not None, "a forward pass that keeps what is needed comes first"
        d, narrow = self._passes.last_backward(
            self.weights.norm, to.norm, tape.last, micro.predict, d_hidden
        )
        for layer, gradient in zip(reversed(self.weights.layers), reversed(to.layers), strict=True):
            narrow = self._passes.backward(
                layer, gradient, tape.layers.pop(), tape.positions, d, narrow
            )
        to.embedding.index_add_(0, micro.input_ids[0], d)


def positions(micro: MicroBatch, inv_freq: Tensor, rope_scale: float) -> Positions:
    rows = micro.layout.varlen
    assert rows is not None, "micro-batches on a GPU have it"
    angles = micro.position_ids[0].float()[:, None] * inv_freq.to(micro.position_ids.device)
    return Positions(angles.cos() * rope_scale, angles.sin() * rope_scale, rows)


def _add(to: Linear, d_out: Tensor, x: Tensor) -> None:
    """The gradient of a linear layer's weights, summed in float32."""
    add_product(to.weight, d_out.t(), x)
    if to.bias is not None:
        to.bias.add_(d_out.sum(0, dtype=to.bias.dtype))


def add_product(to: Tensor, a: Tensor, b: Tensor) -> None:
    """to += a @ b, for a `to` that may be wider."""
    wide: dict[str, Any] = {"out_dtype": to.dtype} if a.dtype != to.dtype else {}
    torch.addmm(to, a, b, out=to, **wide)
