"""The built-in forward pass of the native engine on any device, in plain PyTorch.

It decodes one token for each live slot, or prefills a chunk of several prompts. Every slot owns a
row of the KV cache [layer, slot, kv head, k or v, position, head_dim]. In this order, the key
matrices of the slots are evenly spaced in memory, so attention over the first n slots is one
batched matmul without a copy. Live slots are dense at the front, so slices replace gathers.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from paceline.model.fp8 import rounded
from paceline.model.linear import linear
from paceline.model.shape import head_dim
from paceline.model.weights import DecoderWeights, Layer

WINDOW = 16  # attention spans a multiple of this many positions
LONG_ROW = 3  # cost of a position of a row that attends by itself, compared with the other rows
MIN_SAVING = 4096  # positions; less does not pay for the additional operations


class Decoder:
    def __init__(
        self,
        config: PretrainedConfig,
        weights: DecoderWeights,
        slots: int,
        max_length: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.weights = weights
        # The cache holds numbers of this type, but in the dtype of the weights: converting it for
        # every step would take longer than attention.
        self.kv_dtype = kv_dtype
        self.max_length = max_length
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = head_dim(config), config.rms_norm_eps
        self.scale = self.head_dim**-0.5
        self.cache_shape = (len(weights.layers), slots, self.kv_heads, 2, max_length, self.head_dim)
        device, dtype = weights.embedding.device, weights.embedding.dtype
        with torch.inference_mode():
            angles = torch.arange(max_length, device=device).float()[:, None] * weights.inv_freq.to(
                device
            )
            cos, sin = angles.cos() * weights.rope_scale, angles.sin() * weights.rope_scale
            # One entry per head of a fused q/k/v row; cos 1 and sin 0 leave the values unchanged.
            self.cos = torch.ones(
                max_length,
                self.heads + 2 * self.kv_heads,
                self.head_dim,
                device=device,
                dtype=dtype,
            )
            self.cos[:, : -self.kv_heads] = torch.cat((cos, cos), -1).unsqueeze(1)
            self.sin = torch.zeros_like(self.cos)
            self.sin[:, : -self.kv_heads] = torch.cat((-sin, sin), -1).unsqueeze(1)
            self.columns = torch.arange(max_length, device=device)
            # Start of each slot's rows in the cache of a layer.
            self.rows = (
                torch.arange(slots * self.kv_heads * 2, device=device).view(slots, -1) * max_length
            )
            self.eps_tensor = torch.full((1, 1), self.eps, device=device)
        self._packed: DecoderWeights | None = None
        self.make_cache()

    def drop_packed(self) -> None:
        self._packed = None

    def _fast_weights(self) -> DecoderWeights:
        """Return the weights, the large matrices packed."""
        if self._packed is None:
            self._packed = self.weights.packed()
        return self._packed

    @torch.inference_mode()
    def make_cache(self) -> None:
        self.kv = torch.zeros(self.cache_shape, device=self.cos.device, dtype=self.cos.dtype)
        self._views: tuple[tuple[int, int], list[tuple[Tensor, Tensor]]] = (0, 0), []

    @torch.inference_mode()
    def drop_cache(self) -> None:
        self.kv = self.kv.new_empty(0)
        self._views = (0, 0), []

    @torch.inference_mode()
    def decode(self, tokens: Tensor, at: NDArray[np.int64]) -> Tensor:
        """Return the logits [n, vocabulary] that follow `tokens` [n].

        The tokens are at the positions `at` of the sequences in slots 0..n-1.
        """
        n, positions = len(tokens), torch.from_numpy(at).to(tokens.device)
        window, longest = self._windows(at)
        long = positions.new_tensor(np.flatnonzero(at >= window)) if longest > window else None
        mask = self._mask(positions, window)
        long_mask = None if long is None else self._mask(positions[long], longest)
        places = (self.rows[:n] + positions.unsqueeze(1)).view(-1)
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        weights = self._fast_weights()
        x = weights.embedding.index_select(0, tokens)
        for layer, kv, (keys, values) in zip(
            weights.layers, self.kv, self._keys_values(n, window), strict=True
        ):
            q, new = self._project(layer, x, cos, sin)
            kv.view(-1, self.head_dim).index_copy_(0, places, new.reshape(-1, self.head_dim))
            q = q.reshape(n * self.kv_heads, -1, self.head_dim)
            attended = self._attend(q, keys, values, mask).view(n, -1)
            if long is not None and long_mask is not None:
                few = kv[long, :, :, :longest].flatten(0, 1)
                q = q.view(n, -1)[long].view(len(few), -1, self.head_dim)
                again = self._attend(q, few[:, 0].transpose(1, 2), few[:, 1], long_mask)
                attended[long] = again.view(len(long), -1)
            layer.out.add_to(x, attended)
            self._mlp(layer, x)
        return linear(self._norm(x, weights.norm), weights.head)

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, starts: NDArray[np.int64], slot: int) -> None:
        """Fill the cache of the slots from `slot` on with `tokens` [n, t].

        Row i has the positions starts[i]..starts[i]+t-1. Shorter rows are padded on the right: no
        real token attends to the padding, and decoding overwrites it.
        """
        n, t = tokens.shape
        start, end = int(starts[0]), min(int(starts.max()) + t, self.max_length)
        aligned = bool((starts == start).all())
        if aligned:
            cos, sin = self.cos[start:end].repeat(n, 1, 1), self.sin[start:end].repeat(n, 1, 1)
            mask = self.columns[:end] <= self.columns[start:end, None] if start else None
        else:
            # The last position of a sequence is never in the cache, so padding may go there.
            first = torch.from_numpy(starts).to(tokens.device)[:, None]
            positions = (first + self.columns[:t]).clamp_(max=self.max_length - 1)
            rows = torch.arange(n, device=tokens.device)[:, None]
            cos, sin = self.cos[positions.flatten()], self.sin[positions.flatten()]
            mask = (self.columns[:end] <= positions[:, :, None]).unsqueeze(1)
        x = self.weights.embedding[tokens.flatten()]
        last = len(self.weights.layers) - 1
        for index, (layer, kv) in enumerate(
            zip(self.weights.layers, self.kv[:, slot : slot + n], strict=True)
        ):
            q, new = self._project(layer, x, cos, sin)
            if aligned:
                kv[:, :, :, start:end] = new.unflatten(0, (n, t)).permute(0, 2, 3, 1, 4)
            else:
                kv[rows, :, :, positions] = new.unflatten(0, (n, t))
            if index == last:
                return  # the output of the last layer is not needed
            keys, values = kv[:, :, :, :end].unbind(2)
            q = q.unflatten(0, (n, t)).transpose(1, 2)
            attended = F.scaled_dot_product_attention(
                q, keys, values, mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
            )
            layer.out.add_to(x, attended.transpose(1, 2).reshape(n * t, -1))
            self._mlp(layer, x)

    @torch.inference_mode()
    def copy(self, source: int, target: int, count: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to `count` slots from `target` on."""
        self.kv[:, target : target + count, :, :, :length] = self.kv[
            :, source : source + 1, :, :, :length
        ]

    def _windows(self, at: NDArray[np.int64]) -> tuple[int, int]:
        """Return how many positions all rows attend to, and how many the rows beyond those.

        A few long sequences would otherwise make attention as slow for all the short ones. Their
        keys and values are copied for it, so they count several times.
        """
        n = len(at)
        longest = min(-(-(int(at.max()) + 1) // WINDOW) * WINDOW, self.max_length)
        if n * longest < MIN_SAVING:
            return longest, longest
        ends = np.sort(np.minimum(-(-(at + 1) // WINDOW) * WINDOW, self.max_length))
        # the cost of the window of each row: a window for all, and the rows after it again
        costs = n * ends + LONG_ROW * longest * (n - np.searchsorted(ends, ends, "right"))
        best = int(costs.argmin())
        if n * longest - int(costs[best]) < MIN_SAVING:
            return longest, longest
        return int(ends[best]), longest

    def _mask(self, positions: Tensor, window: int) -> Tensor:
        """Return [n * kv heads, 1, window]: 0 where a key is visible."""
        return (
            torch.where(self.columns[:window] > positions.unsqueeze(1), -torch.inf, 0.0)
            .to(self.kv.dtype)
            .repeat_interleave(self.kv_heads, 0)
            .unsqueeze(1)
        )

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        scores = torch.baddbmm(mask, q, keys, alpha=self.scale)
        return torch.bmm(torch.softmax(scores, -1), values)

    def _keys_values(self, n: int, window: int) -> list[tuple[Tensor, Tensor]]:
        """Return views of the keys [n * kv heads, head_dim, window] and values of each layer.

        They are cached until n or the window changes, because slicing costs as much as a small
        operation.
        """
        if self._views[0] != (n, window):
            visible = self.kv[:, :n].flatten(1, 2)[:, :, :, :window]
            self._views = (n, window), [(kv[:, 0].transpose(1, 2), kv[:, 1]) for kv in visible]
        return self._views[1]

    def _project(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated queries and, in one tensor, rotated keys and values.

        The shapes are [n, heads, head_dim] and [n, kv heads, 2, head_dim].
        """
        qkv = layer.qkv(self._norm(x, layer.input_norm)).view(len(x), -1, self.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            end = qkv.shape[1] - self.kv_heads  # the values are not normalized
            normed = F.rms_norm(qkv[:, :end], (self.head_dim,), None, self.eps)
            torch.mul(normed[:, : self.heads], layer.q_norm, out=qkv[:, : self.heads])
            torch.mul(normed[:, self.heads :], layer.k_norm, out=qkv[:, self.heads : end])
        rotated = (qkv * cos).addcmul_(qkv.roll(self.head_dim // 2, -1), sin)  # halves swapped
        kv = rotated[:, self.heads :].view(len(x), 2, self.kv_heads, -1).transpose(1, 2)
        if self.kv_dtype is not None:
            kv = rounded(kv, self.kv_dtype)
        return rotated[:, : self.heads], kv

    def _mlp(self, layer: Layer, x: Tensor) -> None:
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, -1)
        layer.down.add_to(x, F.silu(gate).mul_(up))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        # Faster than rms_norm and, unlike a matmul of the squares, independent of batch composition
        # to the last bit.
        squares = torch.linalg.vector_norm(x, 2, -1, True).square_()
        return (x * self.eps_tensor.add(squares, alpha=1 / x.shape[1]).rsqrt_()).mul_(weight)
