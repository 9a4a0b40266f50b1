"""The forward pass on a GPU: matrix products by cuBLAS, everything between them by our kernels. No step waits for the host."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from paceline.model.kernels import silu_mul
from paceline.model.operations import matmul_float32, next_power_of_two
from paceline.model.shape import head_dim
from paceline.model.weights import DecoderWeights, Layer, Linear
from paceline.rollout.native import kernels, small
from paceline.rollout.native.kernels import PAGE
from paceline.rollout.native.sampling import token_hashes

LOG2_E = 1.4426950408889634
SPLITS, MORE_SPLITS = (
    16,
    64,
)  # parts of the vocabulary that are sampled in parallel: of many rows, of few
SHARE = 512  # programs of decode attention beyond one for each row and kv head: fill the GPU when few rows are long
Stream = tuple[
    Tensor, Tensor, Tensor
]  # what runs from layer to layer: in float32; times the next norm's gain; sums of squares by tile
Attend = Callable[[Tensor, Tensor], Tensor]  # rotated q/k/v, a layer's cache -> attended


class Forward:
    def __init__(
        self, config: PretrainedConfig, weights: DecoderWeights, slots: int, max_length: int
    ) -> None:
        self.weights = weights
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.eps = head_dim(config), config.rms_norm_eps
        self.group_rows = max(16, next_power_of_two(self.heads // self.kv_heads))
        self.scale = self.dim**-0.5 * LOG2_E
        self.share = SHARE // self.kv_heads
        self.few = small.MOST_ROWS if _few_supported(config, weights) else 0
        self.slots, self.pages_each = slots, -(-max_length // PAGE)
        device = weights.embedding.device
        self.page_bytes = (
            len(weights.layers)
            * self.kv_heads
            * 2
            * PAGE
            * self.dim
            * weights.embedding.element_size()
        )
        angles = torch.arange(max_length, device=device).float()[:, None] * weights.inv_freq.to(
            device
        )
        self.cos, self.sin = angles.cos() * weights.rope_scale, angles.sin() * weights.rope_scale
        self.hashes = token_hashes(len(weights.head), device)

    def step(self, cache: "Cache", state: Tensor, out: Tensor, rows: int, truncated: bool) -> None:
        """One token for each of the first `rows` rows."""
        kernels.plan[(1,)](
            state, cache.table, cache.tick, cache.places, cache.pieces, state.stride(0), self.pages_each,
            SHARE=self.share, ROWS=rows, BLOCK=next_power_of_two(rows), num_warps=8 if rows > 256 else 4,
        )  # fmt: skip

        def attend(qkv: Tensor, kv: Tensor) -> Tensor:
            attended = torch.empty(rows, self.heads * self.dim, device=qkv.device, dtype=qkv.dtype)
            kernels.attend_decode[(rows + self.share, self.kv_heads)](
                qkv, kv, cache.table, cache.pieces, attended, cache.part, cache.part_log, cache.arrivals, self.scale, self.pages_each,
                HEADS=self.heads, KV=self.kv_heads, DIM=self.dim, ROWS=self.group_rows, num_warps=2, num_stages=2,
            )  # fmt: skip
            return attended

        if rows <= self.few:
            x = self._few_layers(state, cache, rows)
        else:
            x = torch.nn.functional.embedding(
                state[kernels.State.LAST, :rows], self.weights.embedding
            )
            self._layers(x, state[kernels.State.POSITION], cache, cache.places, attend, whole=True)
        logits = matmul_float32(self._norm(x, self.weights.norm), self.weights.head.t())
        vocabulary = len(self.weights.head)
        if truncated:
            kernels.truncate[(rows,)](
                logits,
                state,
                cache.floors,
                state.stride(0),
                VOCABULARY=vocabulary,
                BLOCK=4096,
                num_warps=8,
            )
        splits = SPLITS if rows > small.MOST_ROWS else MORE_SPLITS
        kernels.draw[(rows, splits)](
            logits, self.hashes, state, cache.floors, *cache.partial, state.stride(0),
            VOCABULARY=vocabulary, SPLITS=splits, BLOCK=1024, TRUNCATED=truncated,
        )  # fmt: skip
        kernels.advance[(rows,)](
            logits, state, *cache.partial, cache.tick, out, state.stride(0), VOCABULARY=vocabulary, SPLITS=splits, num_warps=1
        )  # fmt: skip

    def prefill(
        self,
        cache: "Cache",
        tokens: Tensor,
        positions: Tensor,
        places: Tensor,
        tiles: Tensor,
        table: Tensor,
    ) -> None:
        """Keys and values of tokens of several sequences, end to end; `places` in the cache, `tiles` for attention."""

        def attend(qkv: Tensor, kv: Tensor) -> Tensor:
            attended = torch.empty(
                len(qkv), self.heads * self.dim, device=qkv.device, dtype=qkv.dtype
            )
            kernels.attend_prefill[(len(tiles), self.heads)](
                qkv, kv, table, tiles, attended, self.scale, self.pages_each,
                HEADS=self.heads, KV=self.kv_heads, DIM=self.dim, ROWS=PAGE, num_stages=2,
            )  # fmt: skip
            return attended

        x = torch.nn.functional.embedding(tokens, self.weights.embedding)
        self._layers(x, positions, cache, places, attend, whole=False)

    def _layers(
        self,
        x: Tensor,
        positions: Tensor,
        cache: "Cache",
        places: Tensor,
        attend: Attend,
        whole: bool,
    ) -> None:
        """Through all layers, in place; when not `whole`, only as far as the last layer's keys and values."""
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            qkv = layer.qkv(self._norm(x, layer.input_norm))
            self._rotate_and_cache(layer, qkv, positions, places, cache.kv[index])
            if index == last and not whole:
                return
            layer.out.add_to(x, attend(qkv, cache.kv[index]))
            layer.down.add_to(x, self._silu_mul(layer.gate_up(self._norm(x, layer.mlp_norm))))

    def _few_layers(self, state: Tensor, cache: "Cache", rows: int) -> Tensor:
        """As `_layers`, by the kernels for few rows: each starts before the one before it has ended."""
        weights, width = self.weights, self.weights.embedding.shape[1]
        inner = weights.layers[0].down.weight.shape[1]
        matrices = {
            "qkv": (small.QKV, width),
            "out": (small.OUT, self.heads * self.dim),
            "gate": (small.GATE, width),
            "down": (small.DOWN, inner),
        }
        shape = {
            name: small.fits(shapes, inputs, rows)[0] for name, (shapes, inputs) in matrices.items()
        }
        tiles = {
            name: width // shape[name].tile for name in ("out", "down")
        }  # each leaves a sum of squares

        def empty(n: int, dtype: torch.dtype = weights.embedding.dtype) -> Tensor:
            return torch.empty(rows, n, dtype=dtype, device=state.device)

        stream = (
            empty(width, torch.float32),
            empty(width),
            empty(max(tiles.values()), torch.float32),
        )
        qkv, attended = (
            empty((self.heads + 2 * self.kv_heads) * self.dim, torch.float32),
            empty(self.heads * self.dim),
        )
        between = empty(inner)
        small.embed[(rows,)](
            state, weights.embedding, weights.layers[0].input_norm, *stream, state.stride(0),
            WIDTH=width, BLOCK=next_power_of_two(width), TILES=tiles["down"], TILES_BLOCK=next_power_of_two(tiles["down"]),
        )  # fmt: skip
        gains = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
        for index, layer in enumerate(weights.layers):
            # others read what was planned for this step before they wait, so the first one is an ordinary kernel: it starts after that
            self._from_stream(
                shape["qkv"], stream, tiles["down"], layer.qkv, qkv, follows=index > 0
            )
            self._attend_few(layer, qkv, state, cache, index, attended)
            self._to_stream(shape["out"], attended, layer.out, layer.mlp_norm, stream)
            self._from_stream(shape["gate"], stream, tiles["out"], layer.gate_up, between)
            self._to_stream(shape["down"], between, layer.down, gains[index], stream)
        return stream[0]

    def _attend_few(
        self, layer: Layer, qkv: Tensor, state: Tensor, cache: "Cache", index: int, out: Tensor
    ) -> None:
        normed, rows = layer.q_norm is not None, len(qkv)
        pieces = min(
            rows + self.share, rows * -(-self.pages_each * PAGE // small.BLOCK)
        )  # `plan` makes none that is shorter
        small.attend[(pieces, self.kv_heads)](
            qkv, self.cos, self.sin, state[kernels.State.POSITION], cache.places, cache.kv[index], cache.table, cache.pieces,
            layer.q_norm if normed else qkv, layer.k_norm if normed else qkv, out, cache.part, cache.part_log, cache.arrivals,
            self.eps, self.scale, self.pages_each, HEADS=self.heads, KV=self.kv_heads, DIM=self.dim, QUERIES=self.group_rows,
            NORMED=normed, BLOCK=small.BLOCK, launch_pdl=True, num_warps=8 if rows <= 8 else 4,
        )  # fmt: skip

    def _from_stream(
        self,
        shape: small.Shape,
        stream: Stream,
        tiles: int,
        linear: Linear,
        out: Tensor,
        follows: bool = True,
    ) -> None:
        rows, width = stream[0].shape
        small.from_stream[(len(linear.weight) // shape.tile,)](
            *stream[1:], linear.weight, linear.weight if linear.bias is None else linear.bias, out, self.eps,
            ROWS=rows, PADDED=next_power_of_two(rows), WIDTH=width, OUT=out.shape[1], TILE=shape.tile, PARTS=shape.parts, PART=shape.part,
            TOGETHER=shape.together(width, rows), TILES=tiles, TILES_BLOCK=next_power_of_two(tiles), BIASED=linear.bias is not None,
            GATED=out.shape[1] < len(linear.weight), launch_pdl=follows, num_warps=shape.parts,
        )  # fmt: skip

    def _to_stream(
        self, shape: small.Shape, values: Tensor, linear: Linear, gain: Tensor, stream: Stream
    ) -> None:
        (rows, width), out = values.shape, stream[0].shape[1]
        small.to_stream[(out // shape.tile,)](
            values, linear.weight, linear.weight if linear.bias is None else linear.bias, gain, *stream,
            ROWS=rows, PADDED=next_power_of_two(rows), WIDTH=width, OUT=out, TILE=shape.tile, PARTS=shape.parts, PART=shape.part,
            TOGETHER=shape.together(width, rows), BIASED=linear.bias is not None, launch_pdl=True, num_warps=shape.parts,
        )  # fmt: skip

    def _rotate_and_cache(
        self, layer: Layer, qkv: Tensor, positions: Tensor, places: Tensor, kv: Tensor
    ) -> None:
        normed = layer.q_norm is not None
        kernels.rotate_and_cache[(len(qkv),)](
            qkv, self.cos, self.sin, positions, places, kv, layer.q_norm if normed else qkv, layer.k_norm if normed else qkv, self.eps,
            HEADS=self.heads, KV=self.kv_heads, DIM=self.dim, ROWS=next_power_of_two(self.heads + 2 * self.kv_heads), NORMED=normed,
        )  # fmt: skip

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x, dtype=weight.dtype)
        block = next_power_of_two(x.shape[1])
        kernels.norm[(len(x),)](
            x,
            weight,
            out,
            self.eps,
            WIDTH=x.shape[1],
            BLOCK=block,
            num_warps=min(8, max(1, block // 512)),
        )
        return out

    def _silu_mul(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[1] // 2
        out = torch.empty(len(gate_up), width, device=gate_up.device, dtype=gate_up.dtype)
        silu_mul[(len(gate_up), -(-width // 1024))](gate_up, out, WIDTH=width, BLOCK=1024)
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
    part_log: Tensor  # the logarithm of the sum of each, once for every value
    arrivals: Tensor  # [row, kv head] pieces that are done; 0 between steps
    floors: Tensor  # [row] the lowest logit kept, as an ordered integer
    partial: tuple[
        Tensor, ...
    ]  # [row * split] softmax maximum and sum, best score of the race and whose it is

    @classmethod
    def make(cls, forward: Forward, pages: int, slots: int, device: torch.device) -> "Cache":
        weights = forward.weights
        pieces = slots + forward.share
        splits = max(slots * SPLITS, small.MOST_ROWS * MORE_SPLITS)

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
            part_log=floats(pieces, forward.kv_heads, forward.group_rows, forward.dim),
            arrivals=ints(slots, forward.kv_heads),
            floors=ints(slots),
            partial=(floats(splits), floats(splits), floats(splits), ints(splits)),
        )  # fmt: skip


def _few_supported(config: PretrainedConfig, weights: DecoderWeights) -> bool:
    """Can the kernels for few rows do this model, on this GPU?"""
    weight, dim = weights.embedding, head_dim(config)
    if (
        not weight.is_cuda
        or weight.dtype != torch.bfloat16
        or torch.cuda.get_device_capability(weight.device) < (9, 0)
        or dim > 128
    ):
        return False
    width, inner, attended = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads * dim,
    )
    whole = all(n % 16 == 0 for n in (width, inner))  # tiles; heads always are
    wanted = ((small.QKV, width), (small.OUT, attended), (small.GATE, width), (small.DOWN, inner))
    return whole and all(small.fits(shapes, n, small.MOST_ROWS) for shapes, n in wanted)
