"""Triton kernels for a decode step of a small batch, on Hopper and newer GPUs.

With up to MAX_ROWS rows, a step is bound by reading the weights, but ordinary kernels spend most of
their time on startup, waiting for the previous kernel and draining. Here a layer is five kernels,
and each reads its weights before it waits for its inputs (programmatic dependent launch), so memory
is never idle between two kernels. The residual stream `x` is float32, with a bfloat16 copy for the
matmuls. All sums have a fixed order, so the same step gives the same bits.
"""

# mypy: ignore-errors
# (Triton kernels share only the syntax of Python)

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.model.operations import next_power_of_two
from paceline.rollout.native.kernels import LAST, PAGE_TL, from_cache, join, to_cache

MAX_ROWS = 16
BLOCK = 128  # positions of a sequence that attention reads at a time


class Shape(NamedTuple):
    """Tiling of a matrix: a program has `tile` of its rows with all their inputs.

    Each of the `parts` warps of a program processes `part` inputs at a time. `room` is the shared
    memory, in KiB, for the weights and for the rows of the batch: a third of a multiprocessor's, or
    all of it.
    """

    tile: int
    parts: int
    part: int
    room: int

    def together(self, width: int, rows: int) -> int:
        """Return how many chunks of `rows` fit into the room."""
        chunk = self.parts * self.part
        chunks = -(-width // chunk)
        free = self.room * 1024 - 2 * self.tile * chunks * chunk
        return min(chunks, free // (2 * chunk * next_power_of_two(rows)))


# Measured: large parts are faster where they fit.
QKV = OUT = (Shape(16, 4, 256, 74), Shape(16, 4, 128, 74), Shape(16, 4, 32, 74))
GATE = (Shape(32, 4, 256, 74), Shape(32, 4, 32, 74), Shape(16, 4, 128, 74), Shape(16, 4, 32, 74))
DOWN = (Shape(8, 8, 128, 224),)


def fits(shapes: Sequence[Shape], width: int, rows: int) -> list[Shape]:
    """Return the shapes with enough room to read 512 inputs of the rows at a time."""
    return [
        shape
        for shape in shapes
        if shape.together(width, rows) * shape.parts * shape.part >= min(width, 512)
    ]


@triton.jit
def _wait():
    """Let the next kernel start reading its weights; then wait for the previous kernels to end."""
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def embed(
    state, embedding, gain, x, x_bf16, squares, stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, TILES_BLOCK: tl.constexpr,
):  # fmt: skip
    """Store what `add_to_residual` would store if x were the embedding of the last tokens."""
    row, at, tile = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, TILES_BLOCK)
    token = tl.load(state + LAST * stride + row).to(tl.int64)
    value = tl.load(embedding + token * WIDTH + at, mask=at < WIDTH, other=0).to(tl.float32)
    tl.store(x + row * WIDTH + at, value, mask=at < WIDTH)
    scaled = value * tl.load(gain + at, mask=at < WIDTH, other=0).to(tl.float32)
    tl.store(x_bf16 + row * WIDTH + at, scaled.to(x_bf16.dtype.element_ty), mask=at < WIDTH)
    tl.store(
        squares + row * TILES + tile,
        tl.where(tile == 0, tl.sum(value * value, 0), 0.0),
        mask=tile < TILES,
    )


@triton.jit
def _inner(chunk, PARTS: tl.constexpr, PART: tl.constexpr):
    """Return the input indices of a chunk: [part, input]. Each warp sums one part."""
    return (
        chunk * (PARTS * PART) + tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    )


@triton.jit
def _tiles(weight, n, WIDTH: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    """Load rows n of a matrix [output, input], in chunks [part, input, output]."""
    tiles = ()
    for chunk in tl.static_range((WIDTH + PARTS * PART - 1) // (PARTS * PART)):
        k = _inner(chunk, PARTS, PART)[:, :, None]
        here = weight + n.to(tl.int64)[None, None, :] * WIDTH + k
        if weight.dtype.element_ty == tl.float8e4nv:
            tile = tl.load(here, mask=k < WIDTH, other=0.0, eviction_policy="evict_first")
        else:
            tile = tl.load(here, mask=k < WIDTH, other=0, eviction_policy="evict_first")
        tiles = tiles + (tile,)  # noqa: RUF005 (Triton does not support unpacking)
    return tiles


@triton.jit
def _multiply(
    values, tiles,
    ROWS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Multiply rows [row, input] with tiles to [row, output].

    TOGETHER chunks of the rows are read before the first is used.
    """
    CHUNKS: tl.constexpr = (WIDTH + PARTS * PART - 1) // (PARTS * PART)
    r = tl.arange(0, PADDED)[None, :, None]
    total = tl.zeros([PARTS, PADDED, TILE], tl.float32)
    for start in tl.static_range(0, CHUNKS, TOGETHER):
        inputs = ()
        for i in tl.static_range(TOGETHER):
            if start + i < CHUNKS:
                k = _inner(start + i, PARTS, PART)[:, None, :]
                x = tl.load(values + r * WIDTH + k, mask=(r < ROWS) & (k < WIDTH), other=0)
                inputs = inputs + (x,)  # noqa: RUF005
        for i in tl.static_range(TOGETHER):
            if start + i < CHUNKS:
                # FP8 is converted here, so that nothing waits for the weights before the inputs.
                total = tl.dot(inputs[i], tiles[start + i].to(inputs[i].dtype), total)
    return tl.sum(total, 0)


@triton.jit
def linear_from_residual(
    x_bf16, squares, weight, bias, out, eps, scale,
    ROWS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, TOGETHER: tl.constexpr,
    TILES: tl.constexpr, TILES_BLOCK: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Store out = linear(norm(x)), or silu(its first half) * its second half if gated.

    The norm's scale of a row is applied to the product.
    """
    r, j = tl.arange(0, PADDED), tl.arange(0, TILE)
    n = tl.program_id(0) * TILE + j
    if GATED:  # gate and up columns alternate within a tile
        n = tl.program_id(0) * (TILE // 2) + j // 2 + j % 2 * OUT
    tiles = _tiles(weight, n, WIDTH, PARTS, PART)
    if BIASED:
        offset = tl.load(bias + n).to(tl.float32)[None, :]
    if SCALED:
        factor = tl.load(scale + n)[None, :]
    _wait()
    tile = tl.arange(0, TILES_BLOCK)[None, :]
    square = tl.load(
        squares + r[:, None] * TILES + tile, mask=(tile < TILES) & (r < ROWS)[:, None], other=0
    )
    value = (
        _multiply(x_bf16, tiles, ROWS, PADDED, WIDTH, TILE, PARTS, PART, TOGETHER)
        * tl.rsqrt(tl.sum(square, 1) / WIDTH + eps)[:, None]
    )
    if SCALED:
        value *= factor
    if BIASED:
        value += offset
    if GATED:
        gate, up = tl.split(tl.reshape(value, [PADDED, TILE // 2, 2]))
        value = gate * tl.sigmoid(gate) * up
        n = tl.program_id(0) * (TILE // 2) + tl.arange(0, TILE // 2)
    tl.store(
        out + r[:, None] * OUT + n[None, :],
        value.to(out.dtype.element_ty),
        mask=(r < ROWS)[:, None],
    )


@triton.jit
def add_to_residual(
    values, weight, bias, gain, x, x_bf16, squares, scale,
    ROWS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, TOGETHER: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Compute x += linear(values) and what the next norm needs.

    That is x times the norm's gain, and the sum of squares of each tile.
    """
    r, n = tl.arange(0, PADDED), tl.program_id(0) * TILE + tl.arange(0, TILE)
    tiles = _tiles(weight, n, WIDTH, PARTS, PART)
    gains = tl.load(gain + n).to(tl.float32)[None, :]
    if BIASED:
        offset = tl.load(bias + n).to(tl.float32)[None, :]
    if SCALED:
        factor = tl.load(scale + n)[None, :]
    _wait()
    at, inside = r[:, None] * OUT + n[None, :], (r < ROWS)[:, None]
    value = tl.load(x + at, mask=inside, other=0)
    product = _multiply(values, tiles, ROWS, PADDED, WIDTH, TILE, PARTS, PART, TOGETHER)
    if SCALED:
        product *= factor
    value += product
    if BIASED:
        value += offset
    tl.store(x + at, value, mask=inside)
    tl.store(x_bf16 + at, (value * gains).to(x_bf16.dtype.element_ty), mask=inside)
    tl.store(
        squares + r * (OUT // TILE) + tl.program_id(0), tl.sum(value * value, 1), mask=r < ROWS
    )


@triton.jit
def _rotated(
    here, norm, cos, sin, eps, inside, DIM: tl.constexpr, NORMED: tl.constexpr, dtype: tl.constexpr
):
    """Return heads [head, DIM], normalized if NORMED, rotated by cos and the signed sin."""
    d = tl.arange(0, DIM)[None, :]
    other = (d + DIM // 2) % DIM
    a, b = tl.load(here + d, mask=inside, other=0), tl.load(here + other, mask=inside, other=0)
    if NORMED:
        scale = tl.rsqrt(tl.sum(a * a, 1) / DIM + eps)[:, None]
        a = a * scale * tl.load(norm + d).to(tl.float32)
        b = b * scale * tl.load(norm + other).to(tl.float32)
    return (a * cos + b * sin).to(dtype)


@triton.jit
def _block(
    base, table_row, n, end,
    KV: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Load keys and values of positions n..n + BLOCK; those beyond the end are 0."""
    o, d = n + tl.arange(0, BLOCK), tl.arange(0, DIM)[None, :]
    inside = (o < end)[:, None]
    page = tl.load(table_row + o // PAGE_TL, mask=o < end, other=0).to(tl.int64)
    here = (base + page * (KV * 2 * PAGE_TL * DIM) + (o % PAGE_TL) * DIM)[:, None] + d
    return from_cache(here, inside, dtype), from_cache(here + PAGE_TL * DIM, inside, dtype)


@triton.jit
def _accumulate(q, k, v, n, end, scale, most, mass, values, BLOCK: tl.constexpr):
    """Add a block of keys and values to the online softmax."""
    inside = (n + tl.arange(0, BLOCK) < end)[None, :]
    scores = tl.where(inside, tl.dot(q, tl.trans(k)) * scale, -1e30)
    higher = tl.maximum(most, tl.max(scores, 1))
    weight = tl.where(inside, tl.exp2(scores - higher[:, None]), 0.0)
    fade = tl.exp2(most - higher)
    values = values * fade[:, None] + tl.dot(weight.to(v.dtype), v)
    return higher, mass * fade + tl.sum(weight, 1), values


@triton.jit
def attend(
    qkv, cos, sin, positions, places, cache, table, chunks, q_norm, k_norm, out, part, part_log,
    arrivals, eps, scale, width,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr,
    NORMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend as `kernels.attend_decode` does, and rotate the queries and keys.

    The program with the last chunk of a row starts with the new key and value and writes them to
    the cache. The old ones, and `chunks`, are complete before the first kernel of this layer.
    """
    chunk, kv = tl.program_id(0), tl.program_id(1)
    entry = chunks + chunk * 8
    row, start, stop = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2)
    count, first = tl.load(entry + 3), tl.load(entry + 4)
    if row < 0:
        return
    GROUP: tl.constexpr = HEADS // KV
    HALF: tl.constexpr = DIM // 2
    dtype: tl.constexpr = out.dtype.element_ty
    kept: tl.constexpr = cache.dtype.element_ty
    newest = chunk == first + count - 1
    end = tl.where(newest, stop - 1, stop)
    base, table_row = cache + kv * (2 * PAGE_TL * DIM), table + row * width
    k, v = _block(base, table_row, start, end, KV, DIM, BLOCK, dtype)
    g, d = tl.arange(0, QUERIES)[:, None], tl.arange(0, DIM)[None, :]
    position, place = tl.load(positions + row), tl.load(places + row).to(tl.int64)
    c, s = tl.load(cos + position * HALF + d % HALF), tl.load(sin + position * HALF + d % HALF)
    s = tl.where(d < HALF, -s, s)
    _wait()
    here = qkv + row * ((HEADS + 2 * KV) * DIM)
    mine = g < GROUP
    q = _rotated(here + (kv * GROUP + g) * DIM, q_norm, c, s, eps, mine, DIM, NORMED, dtype)
    new_k = _rotated(here + (HEADS + kv) * DIM, k_norm, c, s, eps, d >= 0, DIM, NORMED, dtype)
    new_k = to_cache(new_k, kept)
    new_v = to_cache(tl.load(here + (HEADS + KV + kv) * DIM + d).to(dtype), kept)
    if newest:
        there = (
            cache
            + ((place // PAGE_TL) * KV + kv) * (2 * PAGE_TL * DIM)
            + (place % PAGE_TL) * DIM
            + d
        )
        tl.store(there, new_k)
        tl.store(there + PAGE_TL * DIM, new_v)
    most = tl.where(newest, tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * scale, -1e30)
    mass = tl.zeros([QUERIES], tl.float32) + tl.where(newest, 1.0, 0.0)
    values = tl.zeros([QUERIES, DIM], tl.float32) + tl.where(newest, new_v.to(tl.float32), 0.0)
    most, mass, values = _accumulate(q, k, v, start, end, scale, most, mass, values, BLOCK)
    for n in range(start + BLOCK, end, BLOCK):
        k, v = _block(base, table_row, n, end, KV, DIM, BLOCK, dtype)
        most, mass, values = _accumulate(q, k, v, n, end, scale, most, mass, values, BLOCK)
    values = values / mass[:, None]
    there = out + row * (HEADS * DIM) + (kv * GROUP + g) * DIM + d
    if count == 1:
        tl.store(there, values.to(out.dtype.element_ty), mask=mine)
        return
    at = ((chunk * KV + kv) * QUERIES + g) * DIM + d
    tl.store(part + at, values)
    tl.store(part_log + at, tl.zeros([QUERIES, DIM], tl.float32) + (most + tl.log2(mass))[:, None])
    tl.debug_barrier()  # all writes are complete before this program is counted
    if tl.atomic_add(arrivals + row * KV + kv, 1, sem="acq_rel") == count - 1:
        join(
            part, part_log, arrivals + row * KV + kv, there, mine, first, count, kv,
            KV, DIM, QUERIES, 8,
        )  # fmt: skip
