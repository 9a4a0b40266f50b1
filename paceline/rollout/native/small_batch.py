"""A decode step of few sequences, on GPUs that can start a kernel while the one before it still runs (Hopper and newer).

With up to MOST_ROWS rows a step is bound by reading the weights, but ordinary kernels spend most of their time starting, waiting for
the one before and draining. Here a layer is five kernels, and each reads its weights before it waits for what it works on
(programmatic dependent launch), so that memory is never idle between two of them. `x`, the sum that runs from layer to layer, is kept in
float32, and narrowed for those who read it whole. Everything is summed in a fixed order: the same step gives the same bits.
"""

# mypy: ignore-errors
# (kernels are written in the language of Triton, of which only the syntax is Python's)

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.rollout.native.kernels import _PAGE, LAST, join

MOST_ROWS = 16
BLOCK = 128  # positions of a sequence that attention looks at together


class Shape(NamedTuple):
    """How a matrix is worked on: a program has `tile` rows of it and all their inputs, each of its `parts` warps `part` inputs at a
    time. Room, in KiB, for those and for the rows they are multiplied with: a third of a multiprocessor, or all of it."""

    tile: int
    parts: int
    part: int
    room: int

    def together(self, width: int, rows: int) -> int:
        """How many chunks of `rows` there is room for."""
        chunk = self.parts * self.part
        chunks = -(-width // chunk)
        return min(
            chunks,
            (self.room * 1024 - 2 * self.tile * chunks * chunk)
            // (2 * chunk * (1 << (rows - 1).bit_length())),
        )


# measured: large parts are faster where there is room for them
QKV = OUT = (Shape(16, 4, 256, 74), Shape(16, 4, 128, 74), Shape(16, 4, 32, 74))
GATE = (Shape(32, 4, 256, 74), Shape(32, 4, 32, 74), Shape(16, 4, 128, 74), Shape(16, 4, 32, 74))
DOWN = (Shape(8, 8, 128, 224),)


def fits(shapes: Sequence[Shape], width: int, rows: int) -> list[Shape]:
    """Those that have room to read enough of the rows at once."""
    return [
        shape
        for shape in shapes
        if shape.together(width, rows) * shape.parts * shape.part >= min(width, 512)
    ]


@triton.jit
def _wait():
    """Let the next kernel start, to read its weights; then wait until all kernels before this one have written what they have to."""
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def embed(
    state, embedding, gain, x, narrow, squares, stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, TILES_BLOCK: tl.constexpr,
):  # fmt: skip
    """What `to_stream` would leave behind if x were the embedding of the last tokens."""
    row, at, tile = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, TILES_BLOCK)
    token = tl.load(state + LAST * stride + row).to(tl.int64)
    value = tl.load(embedding + token * WIDTH + at, mask=at < WIDTH, other=0).to(tl.float32)
    tl.store(x + row * WIDTH + at, value, mask=at < WIDTH)
    scaled = value * tl.load(gain + at, mask=at < WIDTH, other=0).to(tl.float32)
    tl.store(narrow + row * WIDTH + at, scaled.to(narrow.dtype.element_ty), mask=at < WIDTH)
    tl.store(
        squares + row * TILES + tile,
        tl.where(tile == 0, tl.sum(value * value, 0), 0.0),
        mask=tile < TILES,
    )


@triton.jit
def _inner(chunk, PARTS: tl.constexpr, PART: tl.constexpr):
    """Which inputs a chunk is about: [part, inner]. Each warp sums a part of its own."""
    return (
        chunk * (PARTS * PART) + tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    )


@triton.jit
def _tiles(weight, n, WIDTH: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    """Rows n of a matrix [output, input], in chunks [part, input, output]."""
    tiles = ()
    for chunk in tl.static_range((WIDTH + PARTS * PART - 1) // (PARTS * PART)):
        k = _inner(chunk, PARTS, PART)[:, :, None]
        tile = tl.load(
            weight + n.to(tl.int64)[None, None, :] * WIDTH + k,
            mask=k < WIDTH,
            other=0,
            eviction_policy="evict_first",
        )
        tiles = tiles + (tile,)  # noqa: RUF005 (there is no unpacking in Triton)
    return tiles


@triton.jit
def _multiply(
    values, tiles, ROWS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Rows [row, input] times tiles: [row, output]. TOGETHER chunks of the rows are read before the first is used."""
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
                total = tl.dot(inputs[i], tiles[start + i], total)
    return tl.sum(total, 0)


@triton.jit
def from_stream(
    narrow, squares, weight, bias, out, eps,
    ROWS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, TOGETHER: tl.constexpr, TILES: tl.constexpr, TILES_BLOCK: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """out = linear(norm(x)); gated: silu(its first half) * its second half. The norm's scale of a row is applied to the product."""
    r, j = tl.arange(0, PADDED), tl.arange(0, TILE)
    n = tl.program_id(0) * TILE + j
    if GATED:  # half a tile of each, by turns
        n = tl.program_id(0) * (TILE // 2) + j // 2 + j % 2 * OUT
    tiles = _tiles(weight, n, WIDTH, PARTS, PART)
    if BIASED:
        offset = tl.load(bias + n).to(tl.float32)[None, :]
    _wait()
    tile = tl.arange(0, TILES_BLOCK)[None, :]
    square = tl.load(
        squares + r[:, None] * TILES + tile, mask=(tile < TILES) & (r < ROWS)[:, None], other=0
    )
    value = (
        _multiply(narrow, tiles, ROWS, PADDED, WIDTH, TILE, PARTS, PART, TOGETHER)
        * tl.rsqrt(tl.sum(square, 1) / WIDTH + eps)[:, None]
    )
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
def to_stream(
    values, weight, bias, gain, x, narrow, squares,
    ROWS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, TOGETHER: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """x += linear(values). Leaves what the norm that comes next needs: x times its gain, and the sum of squares of each tile."""
    r, n = tl.arange(0, PADDED), tl.program_id(0) * TILE + tl.arange(0, TILE)
    tiles = _tiles(weight, n, WIDTH, PARTS, PART)
    gains = tl.load(gain + n).to(tl.float32)[None, :]
    if BIASED:
        offset = tl.load(bias + n).to(tl.float32)[None, :]
    _wait()
    at, inside = r[:, None] * OUT + n[None, :], (r < ROWS)[:, None]
    value = tl.load(x + at, mask=inside, other=0) + _multiply(
        values, tiles, ROWS, PADDED, WIDTH, TILE, PARTS, PART, TOGETHER
    )
    if BIASED:
        value += offset
    tl.store(x + at, value, mask=inside)
    tl.store(narrow + at, (value * gains).to(narrow.dtype.element_ty), mask=inside)
    tl.store(
        squares + r * (OUT // TILE) + tl.program_id(0), tl.sum(value * value, 1), mask=r < ROWS
    )


@triton.jit
def _rotated(
    here, norm, cos, sin, eps, inside, DIM: tl.constexpr, NORMED: tl.constexpr, dtype: tl.constexpr
):
    """Some heads [head, DIM], normed where the model does that, turned by cos and (with its sign) sin."""
    d = tl.arange(0, DIM)[None, :]
    other = (d + DIM // 2) % DIM
    a, b = tl.load(here + d, mask=inside, other=0), tl.load(here + other, mask=inside, other=0)
    if NORMED:
        scale = tl.rsqrt(tl.sum(a * a, 1) / DIM + eps)[:, None]
        a = a * scale * tl.load(norm + d).to(tl.float32)
        b = b * scale * tl.load(norm + other).to(tl.float32)
    return (a * cos + b * sin).to(dtype)


@triton.jit
def _block(base, table_row, n, end, KV: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and values of the positions n..n + BLOCK, as far as they are before the end: what lies behind may be anything."""
    o, d = n + tl.arange(0, BLOCK), tl.arange(0, DIM)[None, :]
    inside = (o < end)[:, None]
    page = tl.load(table_row + o // _PAGE, mask=o < end, other=0).to(tl.int64)
    here = (base + page * (KV * 2 * _PAGE * DIM) + (o % _PAGE) * DIM)[:, None] + d
    return tl.load(here, mask=inside, other=0), tl.load(here + _PAGE * DIM, mask=inside, other=0)


@triton.jit
def _look(q, k, v, n, end, scale, most, mass, values, BLOCK: tl.constexpr):
    """One step of the online softmax."""
    inside = (n + tl.arange(0, BLOCK) < end)[None, :]
    scores = tl.where(inside, tl.dot(q, tl.trans(k)) * scale, -1e30)
    higher = tl.maximum(most, tl.max(scores, 1))
    weight = tl.where(inside, tl.exp2(scores - higher[:, None]), 0.0)
    fade = tl.exp2(most - higher)
    values = values * fade[:, None] + tl.dot(weight.to(v.dtype), v)
    return higher, mass * fade + tl.sum(weight, 1), values


@triton.jit
def attend(
    qkv, cos, sin, positions, places, cache, table, pieces, q_norm, k_norm, out, part, part_log, arrivals, eps, scale, width,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, NORMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `kernels.attend_decode`, with positions put into queries and keys on the way. Whoever has the last piece of a row sees the new
    key and value first and puts them into the cache. Old keys and values, and `pieces`, are there before this layer's first kernel."""
    piece, kv = tl.program_id(0), tl.program_id(1)
    entry = pieces + piece * 8
    row, start, stop = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2)
    count, first = tl.load(entry + 3), tl.load(entry + 4)
    if row < 0:
        return
    GROUP: tl.constexpr = HEADS // KV
    HALF: tl.constexpr = DIM // 2
    dtype: tl.constexpr = cache.dtype.element_ty
    newest = piece == first + count - 1
    end = tl.where(newest, stop - 1, stop)
    base, table_row = cache + kv * (2 * _PAGE * DIM), table + row * width
    k, v = _block(base, table_row, start, end, KV, DIM, BLOCK)
    g, d = tl.arange(0, QUERIES)[:, None], tl.arange(0, DIM)[None, :]
    position, place = tl.load(positions + row), tl.load(places + row).to(tl.int64)
    c, s = tl.load(cos + position * HALF + d % HALF), tl.load(sin + position * HALF + d % HALF)
    s = tl.where(d < HALF, -s, s)
    _wait()
    here = qkv + row * ((HEADS + 2 * KV) * DIM)
    mine = g < GROUP
    q = _rotated(here + (kv * GROUP + g) * DIM, q_norm, c, s, eps, mine, DIM, NORMED, dtype)
    new_k = _rotated(here + (HEADS + kv) * DIM, k_norm, c, s, eps, d >= 0, DIM, NORMED, dtype)
    new_v = tl.load(here + (HEADS + KV + kv) * DIM + d).to(dtype)
    if newest:
        there = cache + ((place // _PAGE) * KV + kv) * (2 * _PAGE * DIM) + (place % _PAGE) * DIM + d
        tl.store(there, new_k)
        tl.store(there + _PAGE * DIM, new_v)
    most = tl.where(newest, tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * scale, -1e30)
    mass = tl.zeros([QUERIES], tl.float32) + tl.where(newest, 1.0, 0.0)
    values = tl.zeros([QUERIES, DIM], tl.float32) + tl.where(newest, new_v.to(tl.float32), 0.0)
    most, mass, values = _look(q, k, v, start, end, scale, most, mass, values, BLOCK)
    for n in range(start + BLOCK, end, BLOCK):
        k, v = _block(base, table_row, n, end, KV, DIM, BLOCK)
        most, mass, values = _look(q, k, v, n, end, scale, most, mass, values, BLOCK)
    values = values / mass[:, None]
    there = out + row * (HEADS * DIM) + (kv * GROUP + g) * DIM + d
    if count == 1:
        tl.store(there, values.to(out.dtype.element_ty), mask=mine)
        return
    at = ((piece * KV + kv) * QUERIES + g) * DIM + d
    tl.store(part + at, values)
    tl.store(part_log + at, tl.zeros([QUERIES, DIM], tl.float32) + (most + tl.log2(mass))[:, None])
    tl.debug_barrier()  # all of it is written before this program is counted
    if tl.atomic_add(arrivals + row * KV + kv, 1, sem="acq_rel") == count - 1:
        join(
            part,
            part_log,
            arrivals + row * KV + kv,
            there,
            mine,
            first,
            count,
            kv,
            KV,
            DIM,
            QUERIES,
            8,
        )
