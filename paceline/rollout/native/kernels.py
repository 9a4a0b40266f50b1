"""Triton kernels of the native engine: norm, rotary embedding and paged attention.

The KV cache of a layer is [page, kv head, k or v, PAGE positions, head_dim]. Page 0 belongs to no
sequence and takes the writes of idle rows. The state of each row of the batch is a column of the
`state` matrix [field, row] of 32-bit words (see `State`).
"""

# mypy: ignore-errors
# (Triton kernels share only the syntax of Python)

from enum import IntEnum

import triton
import triton.language as tl

PAGE = 64  # positions per page of the KV cache


class State(IntEnum):
    """Rows of the state matrix."""

    POSITION = 0  # position of the last token
    LAST = 1  # the last token
    LIMIT = 2  # highest allowed position; a row at its limit is idle
    SEED_LOW = 3
    SEED_HIGH = 4
    TEMPERATURE = 5  # bits of a float32
    TOP_K = 6
    TOP_P = 7  # bits of a float32


POSITION, LAST, LIMIT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SEED_LOW, SEED_HIGH = tl.constexpr(3), tl.constexpr(4)
TEMPERATURE, TOP_K, TOP_P = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
PAGE_TL = tl.constexpr(PAGE)
FP8_MAX = tl.constexpr(448.0)  # largest number of float8_e4m3fn


@triton.jit
def norm(x, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(x + row * WIDTH + at, mask=inside, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    value = value * scale * tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def to_cache(x, dtype: tl.constexpr):
    """Convert keys or values to the type of the cache; FP8 saturates."""
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -FP8_MAX), FP8_MAX)
    return x.to(dtype)


@triton.jit
def from_cache(here, mask, dtype: tl.constexpr):
    """Load keys or values; those outside the mask are 0, and FP8 becomes `dtype`."""
    if here.dtype.element_ty == tl.float8e4nv:
        x = tl.load(here, mask=mask, other=0.0).to(dtype)
    else:
        x = tl.load(here, mask=mask, other=0)
    return x


@triton.jit
def rotate_and_cache(
    qkv, cos, sin, positions, places, cache, q_norm, k_norm, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """Rotate the queries in place; write the rotated keys and the values to the cache."""
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = DIM // 2
    head, at = tl.arange(0, ROWS)[:, None], tl.arange(0, HALF)[None, :]
    inside, turned = head < HEADS + 2 * KV, head < HEADS + KV
    here = qkv + token * ((HEADS + 2 * KV) * DIM) + head * DIM + at
    a = tl.load(here, mask=inside, other=0).to(tl.float32)
    b = tl.load(here + HALF, mask=inside, other=0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
        first = tl.where(head < HEADS, tl.load(q_norm + at), tl.load(k_norm + at)).to(tl.float32)
        second = tl.where(
            head < HEADS, tl.load(q_norm + HALF + at), tl.load(k_norm + HALF + at)
        ).to(tl.float32)
        a = tl.where(turned, a * scale * first, a)
        b = tl.where(turned, b * scale * second, b)
    position = tl.load(positions + token)
    c, s = tl.load(cos + position * HALF + at), tl.load(sin + position * HALF + at)
    x = tl.where(turned, a * c - b * s, a).to(qkv.dtype.element_ty)
    y = tl.where(turned, b * c + a * s, b).to(qkv.dtype.element_ty)
    tl.store(here, x, mask=head < HEADS)
    tl.store(here + HALF, y, mask=head < HEADS)
    place = tl.load(places + token).to(tl.int64)
    other = tl.maximum(head - HEADS, 0)  # keys, then values
    part = ((place // PAGE_TL) * KV + other % KV) * 2 + other // KV
    there = cache + part * (PAGE_TL * DIM) + (place % PAGE_TL) * DIM + at
    kept: tl.constexpr = cache.dtype.element_ty
    tl.store(there, to_cache(x, kept), mask=(head >= HEADS) & inside)
    tl.store(there + HALF, to_cache(y, kept), mask=(head >= HEADS) & inside)


@triton.jit
def plan(
    state, table, tick, places, chunks, stride, width,
    EXTRA: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Plan a decode step: the place of each row's new key, and the chunks that attention works on.

    An entry of `chunks` is: row, start and stop in the row, the row's number of chunks and the
    index of its first chunk. All chunks have one size, chosen so that there are at most EXTRA more
    than rows: a few long rows are split, many rows are not. Unused entries have row -1.
    """
    row = tl.arange(0, BLOCK)
    inside = row < ROWS
    position = tl.load(state + POSITION * stride + row, mask=inside, other=0)
    limit = tl.load(state + LIMIT * stride + row, mask=inside, other=0)
    moving = inside & (position < limit)
    page = tl.load(table + row.to(tl.int64) * width + position // PAGE_TL, mask=moving, other=0)
    tl.store(places + row, tl.where(moving, page * PAGE_TL + position % PAGE_TL, 0), mask=inside)
    length = tl.where(moving, position + 1, 1)
    total = tl.sum(tl.where(inside, length, 0), 0)
    size = tl.maximum(
        ((total + EXTRA - 1) // EXTRA + PAGE_TL - 1) // PAGE_TL * PAGE_TL, 2 * PAGE_TL
    )
    count = tl.where(inside, (length + size - 1) // size, 0)
    first = tl.cumsum(count, 0) - count
    for i in range(tl.max(count, 0)):
        to = chunks + (first + i) * 8
        tl.store(to, row, mask=i < count)
        tl.store(to + 1, tl.zeros_like(row) + i * size, mask=i < count)
        tl.store(to + 2, tl.minimum((i + 1) * size, length), mask=i < count)
        tl.store(to + 3, count, mask=i < count)
        tl.store(to + 4, first, mask=i < count)
    for i in range(tl.sum(count, 0), ROWS + EXTRA, BLOCK):
        tl.store(
            chunks + (i + row) * 8, tl.full([BLOCK], -1, tl.int32), mask=i + row < ROWS + EXTRA
        )
    tl.store(tick, tl.load(tick) + 1)


@triton.jit
def _attend(
    q, base, table_row, start, stop, seen, scale,
    KV: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the online softmax over positions start..stop; row i of q sees those up to seen[i].

    Returns the weighted values, the sum and the maximum.
    """
    d, o = tl.arange(0, DIM), tl.arange(0, PAGE_TL)
    most = tl.full([ROWS], -1e30, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, DIM], tl.float32)
    page = tl.load(table_row + start // PAGE_TL).to(tl.int64)
    for n in range(start, stop, PAGE_TL):
        here = base + page * (KV * 2 * PAGE_TL * DIM) + (o[:, None] * DIM + d[None, :])
        k = tl.load(here)
        if k.dtype == tl.float8e4nv:
            k = k.to(q.dtype)
        # Positions beyond the end are uninitialized, and 0 * nan is not 0.
        v = from_cache(here + PAGE_TL * DIM, (n + o)[:, None] < stop, q.dtype)
        # The next page is loaded early, so that loads overlap.
        page = tl.load(table_row + (n // PAGE_TL + 1), mask=n + PAGE_TL < stop, other=0).to(
            tl.int64
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((n + o)[None, :] <= seen[:, None], scores, -1e30)
        higher = tl.maximum(most, tl.max(scores, 1))
        weight = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(most - higher)
        values = values * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        mass = mass * fade + tl.sum(weight, 1)
        most = higher
    return values, mass, most


@triton.jit
def join(
    part, part_log, arrivals, there, mine, first, count, kv,
    KV: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Combine the chunks of a row for one kv head; read TOGETHER at a time to hide the latency."""
    g, d = tl.arange(0, ROWS)[:, None], tl.arange(0, DIM)[None, :]
    most = tl.full([ROWS, DIM], -1e30, tl.float32)
    mass = tl.zeros([ROWS, DIM], tl.float32)
    values = tl.zeros([ROWS, DIM], tl.float32)
    for n in range(0, count, TOGETHER):
        logs, parts = (), ()
        for i in tl.static_range(TOGETHER):
            at = ((first + n + i) * KV + kv) * ROWS + g
            inside = mine & (n + i < count)
            logs = logs + (  # noqa: RUF005 (Triton does not support unpacking)
                tl.load(part_log + at * DIM + d, mask=inside, other=-1e30, cache_modifier=".cg"),
            )
            parts = parts + (  # noqa: RUF005
                tl.load(part + at * DIM + d, mask=inside, other=0, cache_modifier=".cg"),
            )
        for i in tl.static_range(TOGETHER):
            higher = tl.maximum(most, logs[i])
            fade, weight = tl.exp2(most - higher), tl.exp2(logs[i] - higher)
            values = values * fade + parts[i] * weight
            mass = mass * fade + weight
            most = higher
    tl.store(there, (values / mass).to(there.dtype.element_ty), mask=mine)
    tl.store(arrivals, 0)


@triton.jit
def attend_decode(
    qkv, cache, table, chunks, out, part, part_log, arrivals, scale, width,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Attend to one chunk of a row for the queries of one kv head.

    The program that completes the last chunk of a row combines them.
    """
    chunk, kv = tl.program_id(0), tl.program_id(1)
    entry = chunks + chunk * 8
    row, start, stop = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2)
    count, first = tl.load(entry + 3), tl.load(entry + 4)
    if row < 0:
        return
    GROUP: tl.constexpr = HEADS // KV
    g, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    mine = (g < GROUP)[:, None]
    q = tl.load(
        qkv + row * ((HEADS + 2 * KV) * DIM) + (kv * GROUP + g)[:, None] * DIM + d[None, :],
        mask=mine,
        other=0,
    )
    seen = tl.zeros([ROWS], tl.int32) + (stop - 1)
    values, mass, most = _attend(
        q, cache + kv * (2 * PAGE_TL * DIM), table + row * width, start, stop, seen, scale,
        KV, DIM, ROWS,
    )  # fmt: skip
    values = values / mass[:, None]
    there = out + row * (HEADS * DIM) + (kv * GROUP + g)[:, None] * DIM + d[None, :]
    if count == 1:
        tl.store(there, values.to(out.dtype.element_ty), mask=mine)
        return
    at = ((chunk * KV + kv) * ROWS + g)[:, None] * DIM + d[None, :]
    tl.store(part + at, values)
    # One copy per value, as `join` reads it.
    tl.store(part_log + at, tl.zeros([ROWS, DIM], tl.float32) + (most + tl.log2(mass))[:, None])
    tl.debug_barrier()  # all writes are complete before this program is counted
    if tl.atomic_add(arrivals + row * KV + kv, 1, sem="acq_rel") == count - 1:
        join(
            part, part_log, arrivals + row * KV + kv, there, mine, first, count, kv,
            KV, DIM, ROWS, 2,
        )  # fmt: skip


@triton.jit
def attend_prefill(
    qkv, cache, table, tiles, out, scale, width,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Attend for one head of one tile of tokens.

    A tile is `count` tokens of one sequence, from row `offset` of the batch and from `start` in the
    sequence.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles + tile * 4).to(tl.int64)
    offset = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    count, start = tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
    kv = head // (HEADS // KV)
    i, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    inside = (i < count)[:, None]
    q = tl.load(
        qkv + (offset + i)[:, None] * ((HEADS + 2 * KV) * DIM) + head * DIM + d[None, :],
        mask=inside,
        other=0,
    )
    base = cache + kv * (2 * PAGE_TL * DIM)
    values, mass, _ = _attend(
        q, base, table + sequence * width, 0, start + count, start + i, scale, KV, DIM, ROWS
    )
    values = (values / mass[:, None]).to(out.dtype.element_ty)
    tl.store(
        out + (offset + i)[:, None] * (HEADS * DIM) + head * DIM + d[None, :], values, mask=inside
    )
