"""The forward pass on a GPU: matrix products by cuBLAS, everything between them by our kernels. No step waits for the host."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from paceline.rollout.native import kernels
from paceline.rollout.native.kernels import PAGE, SPLITS
from paceline.rollout.native.sampling import Sampler
from paceline.rollout.native.weights import DecoderWeights, Layer, head_dim

LOG2_E = 1.4426950408889634
SHARE = 512  # programs of decode attention beyond one for each row and kv head: fill the GPU when few rows are long
Attend = Callable[[Tensor, Tensor], Tensor]  # rotated q/k/v, a layer's cache -> attended


class Forward:
    def __init__(self, config: PretrainedConfig, weights: DecoderWeights, slots: int, max_length: int) -> None:
        self.weights = weights
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.eps = head_dim(config), config.rms_norm_eps
        self.group_rows = max(16, _power(self.heads // self.kv_heads))
        self.scale = self.dim**-0.5 * LOG2_E
        self.share = SHARE // self.kv_heads
        self.slots, self.pages_each = slots, -(-max_length // PAGE)
        device = weights.embedding.device
        self.page_bytes = len(weights.layers) * self.kv_heads * 2 * PAGE * self.dim * weights.embedding.element_size()
        angles = torch.arange(max_length, device=device).float()[:, None] * weights.inv_freq.to(device)
        self.cos, self.sin = angles.cos() * weights.rope_scale, angles.sin() * weights.rope_scale
        self.hashes = Sampler(len(weights.head), device).ids

    def step(self, cache: "Cache", state: Tensor, out: Tensor, rows: int, truncated: bool) -> None:
        """One token for each of the first `rows` rows."""
        kernels.plan[(1,)](
            state, cache.table, cache.tick, cache.places, cache.pieces, state.stride(0), self.pages_each,
            SHARE=self.share, ROWS=rows, BLOCK=_power(rows), num_warps=8 if rows > 256 else 4,
        )  # fmt: skip

        def attend(qkv: Tensor, kv: Tensor) -> Tensor:
            attended = torch.empty(rows, self.heads * self.dim, device=qkv.device, dtype=qkv.dtype)
            kernels.attend_decode[(rows + self.share, self.kv_heads)](
                qkv, kv, cache.table, cache.pieces, attended, cache.part, cache.part_log, cache.arrivals, self.scale, self.pages_each,
                HEADS=self.heads, KV=self.kv_heads, DIM=self.dim, ROWS=self.group_rows, num_warps=2, num_stages=2,
            )  # fmt: skip
            return attended

        x = torch.nn.functional.embedding(state[kernels.State.LAST, :rows], self.weights.embedding)
        self._layers(x, state[kernels.State.POSITION], cache, cache.places, attend, whole=True)
        logits = _wide_product(self._norm(x, self.weights.norm), self.weights.head.t())
        vocabulary = len(self.weights.head)
        if truncated:
            kernels.truncate[(rows,)](logits, state, cache.floors, state.stride(0), VOCABULARY=vocabulary, BLOCK=4096, num_warps=8)
        kernels.draw[(rows, SPLITS)](
            logits, self.hashes, state, cache.floors, *cache.partial, state.stride(0),
            VOCABULARY=vocabulary, BLOCK=1024, TRUNCATED=truncated,
        )  # fmt: skip
        kernels.advance[(rows,)](logits, state, *cache.partial, cache.tick, out, state.stride(0), VOCABULARY=vocabulary, num_warps=1)

    def prefill(self, cache: "Cache", tokens: Tensor, positions: Tensor, places: Tensor, tiles: Tensor, table: Tensor) -> None:
        """Keys and values of tokens of several sequences, end to end; `places` in the cache, `tiles` for attention."""

        def attend(qkv: Tensor, kv: Tensor) -> Tensor:
            attended = torch.empty(len(qkv), self.heads * self.dim, device=qkv.device, dtype=qkv.dtype)
            kernels.attend_prefill[(len(tiles), self.heads)](
                qkv, kv, table, tiles, attended, self.scale, self.pages_each,
                HEADS=self.heads, KV=self.kv_heads, DIM=self.dim, ROWS=PAGE, num_stages=2,
            )  # fmt: skip
            return attended

        x = torch.nn.functional.embedding(tokens, self.weights.embedding)
        self._layers(x, positions, cache, places, attend, whole=False)

    def _layers(self, x: Tensor, positions: Tensor, cache: "Cache", places: Tensor, attend: Attend, whole: bool) -> None:
        """Through all layers, in place; when not `whole`, only as far as the last layer's keys and values."""
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            qkv = layer.qkv(self._norm(x, layer.input_norm))
            self._rotate_and_cache(layer, qkv, positions, places, cache.kv[index])
            if index == last and not whole:
                return
            layer.out.add_to(x, attend(qkv, cache.kv[index]))
            layer.down.add_to(x, self._silu_mul(layer.gate_up(self._norm(x, layer.mlp_norm))))

    def _rotate_and_cache(self, layer: Layer, qkv: Tensor, positions: Tensor, places: Tensor, kv: Tensor) -> None:
        normed = layer.q_norm is not None
        kernels.rotate_and_cache[(len(qkv),)](
            qkv, self.cos, self.sin, positions, places, kv, layer.q_norm if normed else qkv, layer.k_norm if normed else qkv, self.eps,
            HEADS=self.heads, KV=self.kv_heads, DIM=self.dim, ROWS=_power(self.heads + 2 * self.kv_heads), NORMED=normed,
        )  # fmt: skip

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        block = _power(x.shape[1])
        kernels.norm[(len(x),)](x, weight, out, self.eps, WIDTH=x.shape[1], BLOCK=block, num_warps=min(8, max(1, block // 512)))
        return out

    def _silu_mul(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[1] // 2
        out = torch.empty(len(gate_up), width, device=gate_up.device, dtype=gate_up.dtype)
        kernels.silu_mul[(len(gate_up), -(-width // 1024))](gate_up, out, WIDTH=width, BLOCK=1024)
        return out


@dataclass(frozen=True, slots=True)
class Cache:
    """What a forward pass leaves behind: keys and values by page, and the working arrays of a decode step."""

    kv: Tensor  # [layer, page, kv head, k or v, PAGE, head_dim]
    table: Tensor  # [row, page of the sequence]
    tick: Tensor  # steps made in this burst
    places: Tensor  # [row] where the next key goes: page * PAGE + offset
    pieces: Tensor  # [piece, 8] what attention is done in, see `kernels.plan`
    part: Tensor  # results of the pieces
    part_log: Tensor
    arrivals: Tensor  # [row, kv head] pieces that are done; 0 between steps
    floors: Tensor  # [row] the lowest logit kept, as an ordered integer
    partial: tuple[Tensor, ...]  # [row, split] softmax maximum and sum, best score of the race and whose it is

    @classmethod
    def make(cls, forward: Forward, pages: int, slots: int, device: torch.device) -> "Cache":
        weights = forward.weights
        pieces = slots + forward.share

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device)

        shape = (len(weights.layers), pages, forward.kv_heads, 2, PAGE, forward.dim)
        return cls(
            kv=torch.zeros(shape, dtype=weights.embedding.dtype, device=device),
            table=ints(slots, forward.pages_each),
            tick=ints(1),
            places=ints(slots),
            pieces=ints(pieces, 8),
            part=floats(pieces, forward.kv_heads, forward.group_rows, forward.dim),
            part_log=floats(pieces, forward.kv_heads, forward.group_rows),
            arrivals=ints(slots, forward.kv_heads),
            floors=ints(slots),
            partial=(floats(slots, SPLITS), floats(slots, SPLITS), floats(slots, SPLITS), ints(slots, SPLITS)),
        )  # fmt: skip


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """With float32 coming out: bfloat16 logits would be off by some hundredths."""
    if a.dtype == torch.float32:
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=torch.float32)
