"""The native engine's forward pass on a GPU: cuBLAS matmuls and Triton kernels between them.

No step waits for the host.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from paceline.model.kernels import silu_mul
from paceline.model.operations import matmul_float32, next_power_of_two
from paceline.model.shape import head_dim
from paceline.model.weights import DecoderWeights, Layer, Linear
from paceline.rollout.native import fp8_matmul, kernels, sampling_kernels, small_batch
from paceline.rollout.native.kernels import PAGE
from paceline.rollout.native.sampling import token_hashes

LOG2_E = 1.4426950408889634
# Splits of the vocabulary that are sampled in parallel, with many rows and with few.
SPLITS, MORE_SPLITS = 16, 64
# Programs of decode attention beyond one per row and kv head, to fill the GPU with a few long rows.
EXTRA_PROGRAMS = 512
# The residual stream: x in float32, x times the next norm's gain, sums of squares by tile.
Residual = tuple[Tensor, Tensor, Tensor]
# Maps rotated q/k/v and a layer's cache to the output of attention.
Attend = Callable[[Tensor, Tensor], Tensor]


class Forward:
    def __init__(
        self,
        config: PretrainedConfig,
        weights: DecoderWeights,
        slots: int,
        max_length: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.weights = weights
        self.kv_dtype = kv_dtype or weights.embedding.dtype
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.eps = head_dim(config), config.rms_norm_eps
        self.group_rows = max(16, next_power_of_two(self.heads // self.kv_heads))
        self.scale = self.dim**-0.5 * LOG2_E
        self.extra_chunks = EXTRA_PROGRAMS // self.kv_heads
        # Batches of at most this many rows use the kernels of `small_batch`.
        self.small_rows = small_batch.MAX_ROWS if _small_batch_supported(config, weights) else 0
        self.slots, self.pages_each = slots, -(-max_length // PAGE)
        device = weights.embedding.device
        numbers = len(weights.layers) * self.kv_heads * 2 * PAGE * self.dim
        self.page_bytes = numbers * self.kv_dtype.itemsize
        positions = torch.arange(max_length, device=device).float()
        angles = positions[:, None] * weights.inv_freq.to(device)
        self.cos, self.sin = angles.cos() * weights.rope_scale, angles.sin() * weights.rope_scale
        self.hashes = token_hashes(len(weights.head), device)

    def step(self, cache: "Cache", state: Tensor, out: Tensor, rows: int, truncated: bool) -> None:
        """Generate one token for each of the first `rows` rows."""
        kernels.plan[(1,)](
            state, cache.table, cache.tick, cache.places, cache.chunks, state.stride(0),
            self.pages_each, EXTRA=self.extra_chunks, ROWS=rows, BLOCK=next_power_of_two(rows),
            num_warps=8 if rows > 256 else 4,
        )  # fmt: skip

        def attend(qkv: Tensor, kv: Tensor) -> Tensor:
            attended = torch.empty(rows, self.heads * self.dim, device=qkv.device, dtype=qkv.dtype)
            kernels.attend_decode[(rows + self.extra_chunks, self.kv_heads)](
                qkv, kv, cache.table, cache.chunks, attended, cache.part, cache.part_log,
                cache.arrivals, self.scale, self.pages_each,
                HEADS=self.heads, KV=self.kv_heads, DIM=self.dim, ROWS=self.group_rows,
                num_warps=2, num_stages=2,
            )  # fmt: skip
            return attended

        if rows <= self.small_rows:
            x = self._small_batch_layers(state, cache, rows)
        else:
            tokens = state[kernels.State.LAST, :rows]
            x = torch.nn.functional.embedding(tokens, self.weights.embedding)
            self._layers(x, state[kernels.State.POSITION], cache, cache.places, attend, whole=True)
        logits = matmul_float32(self._norm(x, self.weights.norm), self.weights.head.t())
        vocabulary = len(self.weights.head)
        if truncated:
            sampling_kernels.truncate[(rows,)](
                logits, state, cache.floors, state.stride(0),
                VOCABULARY=vocabulary, BLOCK=4096, num_warps=8,
            )  # fmt: skip
        splits = SPLITS if rows > small_batch.MAX_ROWS else MORE_SPLITS
        sampling_kernels.sample[(rows, splits)](
            logits, self.hashes, state, cache.floors, *cache.partial, state.stride(0),
            VOCABULARY=vocabulary, SPLITS=splits, BLOCK=1024, TRUNCATED=truncated,
        )  # fmt: skip
        sampling_kernels.advance[(rows,)](
            logits, state, *cache.partial, cache.tick, out, state.stride(0),
            VOCABULARY=vocabulary, SPLITS=splits, num_warps=1,
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
        """Fill the cache with the concatenated tokens of several sequences.

        `places` are their places in the cache, `tiles` the work list of attention. Tokens without a
        tile are padding.
        """

        def attend(qkv: Tensor, kv: Tensor) -> Tensor:
            # zeros: padding must stay finite
            attended = torch.zeros(
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
        """Run all layers on x, in place; unless `whole`, end with the last layer's cache write."""
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            qkv = _apply(layer.qkv, self._norm(x, layer.input_norm))
            self._rotate_and_cache(layer, qkv, positions, places, cache.kv[index])
            if index == last and not whole:
                return
            _add_to(layer.out, x, attend(qkv, cache.kv[index]))
            _add_to(
                layer.down, x, self._silu_mul(_apply(layer.gate_up, self._norm(x, layer.mlp_norm)))
            )

    def _small_batch_layers(self, state: Tensor, cache: "Cache", rows: int) -> Tensor:
        """Run all layers with the kernels for small batches and return x.

        Each kernel starts before the previous one has ended.
        """
        weights, width = self.weights, self.weights.embedding.shape[1]
        inner = weights.layers[0].down.weight.shape[1]
        matrices = {
            "qkv": (small_batch.QKV, width),
            "out": (small_batch.OUT, self.heads * self.dim),
            "gate": (small_batch.GATE, width),
            "down": (small_batch.DOWN, inner),
        }
        shape = {
            name: small_batch.fits(shapes, inputs, rows)[0]
            for name, (shapes, inputs) in matrices.items()
        }
        # Each tile of these matrices stores a sum of squares.
        tiles = {name: width // shape[name].tile for name in ("out", "down")}

        def empty(n: int, dtype: torch.dtype = weights.embedding.dtype) -> Tensor:
            return torch.empty(rows, n, dtype=dtype, device=state.device)

        squares = empty(max(tiles.values()), torch.float32)
        residual = (empty(width, torch.float32), empty(width), squares)
        qkv = empty((self.heads + 2 * self.kv_heads) * self.dim, torch.float32)
        attended = empty(self.heads * self.dim)
        between = empty(inner)
        small_batch.embed[(rows,)](
            state, weights.embedding, weights.layers[0].input_norm, *residual, state.stride(0),
            WIDTH=width, BLOCK=next_power_of_two(width),
            TILES=tiles["down"], TILES_BLOCK=next_power_of_two(tiles["down"]),
        )  # fmt: skip
        gains = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
        for index, layer in enumerate(weights.layers):
            # Attention reads the output of `plan` before it waits. The first kernel therefore
            # starts after the previous kernels have ended.
            self._linear_from_residual(
                shape["qkv"], residual, tiles["down"], layer.qkv, qkv, early=index > 0
            )
            self._attend_small_batch(layer, qkv, state, cache, index, attended)
            self._add_to_residual(shape["out"], attended, layer.out, layer.mlp_norm, residual)
            self._linear_from_residual(
                shape["gate"], residual, tiles["out"], layer.gate_up, between
            )
            self._add_to_residual(shape["down"], between, layer.down, gains[index], residual)
        return residual[0]

    def _attend_small_batch(
        self, layer: Layer, qkv: Tensor, state: Tensor, cache: "Cache", index: int, out: Tensor
    ) -> None:
        normed, rows = layer.q_norm is not None, len(qkv)
        # `plan` makes no chunk that is shorter than a block.
        most = rows * -(-self.pages_each * PAGE // small_batch.BLOCK)
        small_batch.attend[(min(rows + self.extra_chunks, most), self.kv_heads)](
            qkv, self.cos, self.sin, state[kernels.State.POSITION], cache.places, cache.kv[index],
            cache.table, cache.chunks, layer.q_norm if normed else qkv,
            layer.k_norm if normed else qkv, out, cache.part, cache.part_log, cache.arrivals,
            self.eps, self.scale, self.pages_each,
            HEADS=self.heads, KV=self.kv_heads, DIM=self.dim, QUERIES=self.group_rows,
            NORMED=normed, BLOCK=small_batch.BLOCK, launch_pdl=True,
            num_warps=8 if rows <= 8 else 4,
        )  # fmt: skip

    def _linear_from_residual(
        self,
        shape: small_batch.Shape,
        residual: Residual,
        tiles: int,
        linear: Linear,
        out: Tensor,
        early: bool = True,
    ) -> None:
        """Apply `linear` to the normalized x; if `early`, start before the previous kernel ends."""
        rows, width = residual[0].shape
        bias = linear.weight if linear.bias is None else linear.bias
        scaled = linear.scale is not None
        small_batch.linear_from_residual[(len(linear.weight) // shape.tile,)](
            *residual[1:], linear.weight, bias, out, self.eps, linear.scale if scaled else bias,
            ROWS=rows, PADDED=next_power_of_two(rows), WIDTH=width, OUT=out.shape[1],
            TILE=shape.tile, PARTS=shape.parts, PART=shape.part,
            TOGETHER=shape.together(width, rows), TILES=tiles, TILES_BLOCK=next_power_of_two(tiles),
            BIASED=linear.bias is not None, GATED=out.shape[1] < len(linear.weight), SCALED=scaled,
            launch_pdl=early, num_warps=shape.parts,
        )  # fmt: skip

    def _add_to_residual(
        self,
        shape: small_batch.Shape,
        values: Tensor,
        linear: Linear,
        gain: Tensor,
        residual: Residual,
    ) -> None:
        (rows, width), out = values.shape, residual[0].shape[1]
        bias = linear.weight if linear.bias is None else linear.bias
        scaled = linear.scale is not None
        small_batch.add_to_residual[(out // shape.tile,)](
            values, linear.weight, bias, gain, *residual, linear.scale if scaled else bias,
            ROWS=rows, PADDED=next_power_of_two(rows), WIDTH=width, OUT=out,
            TILE=shape.tile, PARTS=shape.parts, PART=shape.part,
            TOGETHER=shape.together(width, rows), BIASED=linear.bias is not None, SCALED=scaled,
            launch_pdl=True, num_warps=shape.parts,
        )  # fmt: skip

    def _rotate_and_cache(
        self, layer: Layer, qkv: Tensor, positions: Tensor, places: Tensor, kv: Tensor
    ) -> None:
        normed = layer.q_norm is not None
        kernels.rotate_and_cache[(len(qkv),)](
            qkv, self.cos, self.sin, positions, places, kv, layer.q_norm if normed else qkv,
            layer.k_norm if normed else qkv, self.eps,
            HEADS=self.heads, KV=self.kv_heads, DIM=self.dim,
            ROWS=next_power_of_two(self.heads + 2 * self.kv_heads), NORMED=normed,
        )  # fmt: skip

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x, dtype=weight.dtype)
        block = next_power_of_two(x.shape[1])
        kernels.norm[(len(x),)](
            x, weight, out, self.eps,
            WIDTH=x.shape[1], BLOCK=block, num_warps=min(8, max(1, block // 512)),
        )  # fmt: skip
        return out

    def _silu_mul(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[1] // 2
        out = torch.empty(len(gate_up), width, device=gate_up.device, dtype=gate_up.dtype)
        silu_mul[(len(gate_up), -(-width // 1024))](gate_up, out, WIDTH=width, BLOCK=1024)
        return out


@dataclass(frozen=True, slots=True)
class Cache:
    """The paged KV cache and the working arrays of a decode step."""

    kv: Tensor  # [layer, page, kv head, k or v, PAGE, head_dim]
    table: Tensor  # [row, index] pages of the row's sequence
    tick: Tensor  # steps done in this burst
    places: Tensor  # [row] place of the next key: page * PAGE + offset
    chunks: Tensor  # [chunk, 8] the work list of attention, see `kernels.plan`
    part: Tensor  # results of the chunks
    part_log: Tensor  # logarithm of the softmax sum of each chunk, once per value
    arrivals: Tensor  # [row, kv head] number of completed chunks; 0 between steps
    floors: Tensor  # [row] lowest logit kept, as an ordered integer
    # [row * split] softmax maximum and sum, best score of the race and its token.
    partial: tuple[Tensor, ...]

    @classmethod
    def make(cls, forward: Forward, pages: int, slots: int, device: torch.device) -> "Cache":
        weights = forward.weights
        chunks = slots + forward.extra_chunks
        splits = max(slots * SPLITS, small_batch.MAX_ROWS * MORE_SPLITS)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device)

        shape = (len(weights.layers), pages, forward.kv_heads, 2, PAGE, forward.dim)
        return cls(
            kv=torch.zeros(shape, dtype=forward.kv_dtype, device=device),
            table=ints(slots, forward.pages_each),
            tick=ints(1),
            places=ints(slots),
            chunks=ints(chunks, 8),
            part=floats(chunks, forward.kv_heads, forward.group_rows, forward.dim),
            part_log=floats(chunks, forward.kv_heads, forward.group_rows, forward.dim),
            arrivals=ints(slots, forward.kv_heads),
            floors=ints(slots),
            partial=(floats(splits), floats(splits), floats(splits), ints(splits)),
        )  # fmt: skip


def _apply(linear: Linear, x: Tensor) -> Tensor:
    return linear(x) if linear.scale is None else fp8_matmul.apply(linear, x)


def _add_to(linear: Linear, residual: Tensor, x: Tensor) -> None:
    if linear.scale is None:
        linear.add_to(residual, x)
    else:
        fp8_matmul.add_to(linear, residual, x)


def _small_batch_supported(config: PretrainedConfig, weights: DecoderWeights) -> bool:
    """Return whether the kernels for small batches support this model and GPU."""
    weight, dim = weights.embedding, head_dim(config)
    if (
        not weight.is_cuda
        or weight.dtype != torch.bfloat16
        or torch.cuda.get_device_capability(weight.device) < (9, 0)
        or dim > 128
    ):
        return False
    width, inner = config.hidden_size, config.intermediate_size
    if width % 16 or inner % 16:  # tiles must divide them; they always divide the heads
        return False
    matrices = (
        (small_batch.QKV, width),
        (small_batch.OUT, config.num_attention_heads * dim),
        (small_batch.GATE, width),
        (small_batch.DOWN, inner),
    )
    return all(
        small_batch.fits(shapes, inputs, small_batch.MAX_ROWS) for shapes, inputs in matrices
    )
