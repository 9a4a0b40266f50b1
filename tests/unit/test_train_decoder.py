"""The decoder's explicit forward and backward pass matches transformers and autograd.

Plain torch replaces the GPU kernels, which tests/gpu covers.
"""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from paceline.model.packing import MicroBatch, cut_shared, make_varlen, micro_batch, trained_lengths
from paceline.model.shape import head_dim
from paceline.model.weights import DecoderWeights
from paceline.training.decoder import LayerPasses, TrainDecoder
from paceline.training.operations import Attended, Operations, Positions, Shape
from tests.contract.test_train_engine import MODELS, random_batch, tiny


class TorchOperations(Operations):
    """Operations in plain torch, with gradients by autograd."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x if delta is None else x + delta
        return total, self._norm(total, weight)

    def norm_backward(
        self, x: Tensor, weight: Tensor, d_out: Tensor, d_x: Tensor, d_weight: Tensor
    ) -> Tensor:
        from_x, from_weight = gradient(self._norm, (x, weight), d_out)
        d_x += from_x
        d_weight += from_weight
        return d_x.to(weight.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up

    def silu_mul_backward(self, gate_up: Tensor, d_out: Tensor) -> Tensor:
        out = self.silu_mul(gate_up)
        gate_up.copy_(gradient(self.silu_mul, (gate_up.clone(),), d_out)[0])
        return out

    def rotate(
        self, qkv: Tensor, at: Positions, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> Tensor:
        s = self.shape
        q, k, v = qkv.view(len(qkv), -1, s.dim).split((s.heads, s.kv_heads, s.kv_heads), 1)
        if q_norm is not None and k_norm is not None:
            q, k = self._norm(q, q_norm), self._norm(k, k_norm)
        return torch.cat((self._rotate(q, at), self._rotate(k, at), v), 1).view(len(qkv), -1)

    def rotate_backward(
        self,
        d_qkv: Tensor,
        qkv: Tensor,
        at: Positions,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        given = (qkv,) if q_norm is None or k_norm is None else (qkv, q_norm, k_norm)
        found = gradient(lambda x, a=None, b=None: self.rotate(x, at, a, b), given, d_qkv)
        d_qkv.copy_(found[0])
        return None if q_norm is None else (found[1], found[2])

    def attend(self, qkv: Tensor, at: Positions) -> Attended:
        q, k, v = self._split(qkv, at.rows)
        queries, keys = at.rows.queries.tolist(), at.rows.keys.tolist()
        group = self.shape.heads // self.shape.kv_heads
        rows = []
        for row in range(len(queries) - 1):
            query, key = slice(*queries[row : row + 2]), slice(*keys[row : row + 2])
            q_row, k_row, v_row = (
                q[query],
                k[key].repeat_interleave(group, 1),
                v[key].repeat_interleave(group, 1),
            )
            visible = torch.arange(len(k_row)) <= torch.arange(len(k_row))[-len(q_row) :, None]
            scores = torch.einsum("qhd,khd->hqk", q_row, k_row) * self.shape.dim**-0.5
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            rows.append(torch.einsum("hqk,khd->qhd", weights, v_row))
        return torch.cat(rows).flatten(1), ()

    def attend_backward(
        self, d_out: Tensor, qkv: Tensor, attended: Attended, at: Positions
    ) -> Tensor:
        return gradient(lambda x: self.attend(x, at)[0], (qkv,), d_out)[0]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return (x * (x.square().mean(-1, keepdim=True) + self.shape.eps).rsqrt() * weight).to(
            weight.dtype
        )

    def _rotate(self, x: Tensor, at: Positions) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = at.cos[:, None], at.sin[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def gradient(function: Any, given: tuple[Tensor, ...], d_out: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
        return torch.autograd.grad(function(*leaves), leaves, d_out)


def with_varlen(micro: MicroBatch) -> MicroBatch:
    """Return a CPU's micro-batch with the layout for a GPU."""
    layout = micro.layout
    # Row and position of each token, in the first row that contains it.
    row, position = np.divmod(layout.slots.numpy(), layout.longest)
    own, lengths = np.bincount(row, minlength=layout.rows), np.zeros(layout.rows, np.int64)
    np.maximum.at(lengths, row, position + 1)
    inside = np.arange(layout.longest)[None, :] < lengths[:, None]
    varlen = make_varlen(
        own,
        lengths,
        layout.spread.view(layout.rows, layout.longest).numpy()[inside],
        torch.device("cpu"),
    )
    return replace(micro, layout=replace(layout, varlen=varlen))


def torch_passes(config: PretrainedConfig, checkpointing: bool) -> LayerPasses:
    shape = Shape(
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim(config),
        config.rms_norm_eps,
    )
    return LayerPasses(config, checkpointing, TorchOperations(shape))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_decoder_matches_transformers(name: str, checkpointing: bool) -> None:
    model, batch = tiny(name).double(), random_batch()
    weights = DecoderWeights.from_module(copy.deepcopy(model), share=False)
    needed = trained_lengths(batch)
    rows = np.flatnonzero(needed)
    micro = with_varlen(micro_batch(batch, rows, needed, torch.device("cpu")))
    assert micro.layout.varlen is not None and micro.layout.varlen.source is not None, (
        "the batch must contain rows that share a prompt"
    )
    decoder = TrainDecoder(torch_passes(model.config, checkpointing), weights)
    tape = decoder.start(micro)
    hidden = decoder.forward(micro, tape, keep=True)

    expected, flat = [], []
    for row in rows:
        start = int(batch.offsets[row])
        ids = torch.from_numpy(batch.tokens[start : start + needed[row]].astype(np.int64))[None]
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        trained = np.flatnonzero(batch.mask[start : start + needed[row] + 1])
        expected.append(states[torch.from_numpy(trained - 1)])
        flat.append(start + trained)
    order = torch.from_numpy(
        np.argsort(np.concatenate(flat))[np.searchsorted(np.sort(np.concatenate(flat)), micro.flat)]
    )
    reference = torch.cat(expected)[order]
    assert (hidden - reference).abs().max() < 1e-5  # rotary frequencies are float32

    torch.manual_seed(0)
    upstream = torch.randn_like(hidden)
    reference.backward(upstream)
    found = weights.zeros(torch.float64)
    decoder.backward(micro, tape, upstream, found)
    for parameter, tensor in model.base_model.named_parameters(prefix="model"):
        assert tensor.grad is not None
        assert (found.named[parameter] - tensor.grad).abs().max() < 1e-4 * (
            1 + tensor.grad.abs().max()
        ), parameter


def test_gradients_have_layout_of_weights() -> None:
    weights = DecoderWeights.from_module(tiny("qwen2-tied"), share=False)
    zeros = weights.zeros(torch.float64)
    assert (
        zeros.named.keys() == weights.named.keys()
        and zeros.head.data_ptr() == zeros.embedding.data_ptr()
    )
    zeros.layers[0].qkv.weight.fill_(3)
    assert (zeros.named["model.layers.0.self_attn.v_proj.weight"] == 3).all()
    assert (
        zeros.named["model.layers.0.mlp.up_proj.weight"].shape
        == weights.named["model.layers.0.mlp.up_proj.weight"].shape
    )


def test_cut_shared_counts_shared_prompt_once() -> None:
    a, b = (np.arange(n, dtype=np.int32).tobytes() for n in (6, 5))
    assert cut_shared([10, 10, 10], [a, a, b], 100) == [3]
    assert cut_shared([10, 10, 10], [a, a, b], 14) == [2, 1], "10 + (10 - 6)"
    assert cut_shared([10, 10, 10], [a, b, a], 14) == [1, 1, 1]
    assert cut_shared([50, 10], [a, a], 14) == [1, 1]
