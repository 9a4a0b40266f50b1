"""Triton kernels for training on a GPU: the operations between matmuls, forward and backward.

Matrices are [token, feature] and contiguous. The residual stream and its gradient are float32, and
so is all arithmetic.
"""

# mypy: ignore-errors
# (mypy cannot check Triton code)

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def add_norm(
    x, delta, weight, total, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    """Compute total = x + delta and out = norm(total)."""
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    here = tl.program_id(0).to(tl.int64) * WIDTH + at
    value = tl.load(x + here, mask=inside, other=0)
    if ADD:
        value += tl.load(delta + here, mask=inside, other=0).to(tl.float32)
        tl.store(total + here, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    value = value * scale * tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + here, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])  # it differs from batch to batch
def norm_backward(
    x, weight, d_out, d_x, d_x_cast, d_weight, eps, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the gradient through the norm of x to d_x and cast the result to the compute dtype.

    d_weight has one row per program.
    """
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    w = tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    d_w = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        here = row.to(tl.int64) * WIDTH + at
        value = tl.load(x + here, mask=inside, other=0)
        d = tl.load(d_out + here, mask=inside, other=0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
        value = value * scale
        d_w += d * value
        d = d * w
        d = (d - value * (tl.sum(d * value, 0) / WIDTH)) * scale
        d += tl.load(d_x + here, mask=inside, other=0)
        tl.store(d_x + here, d, mask=inside)
        tl.store(d_x_cast + here, d.to(d_x_cast.dtype.element_ty), mask=inside)
    tl.store(d_weight + tl.program_id(0) * WIDTH + at, d_w, mask=inside)


@triton.jit
def silu_mul_backward(gate_up, d_out, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Replace gate_up by its gradient and recompute the output of `silu_mul` into `out`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    here = gate_up + row * 2 * WIDTH + at
    gate = tl.load(here, mask=inside, other=0).to(tl.float32)
    up = tl.load(here + WIDTH, mask=inside, other=0).to(tl.float32)
    d = tl.load(d_out + row * WIDTH + at, mask=inside, other=0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(out + row * WIDTH + at, (silu * up).to(out.dtype.element_ty), mask=inside)
    d_gate = d * up * (sigmoid + silu * (1 - sigmoid))
    tl.store(here, d_gate.to(gate_up.dtype.element_ty), mask=inside)
    tl.store(here + WIDTH, (d * silu).to(gate_up.dtype.element_ty), mask=inside)


@triton.jit
def rotate(
    qkv, out, cos, sin, q_norm, k_norm, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """Rotate the queries and keys of a token by its position, normed first if NORMED.

    `out` can be `qkv`.
    """
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = DIM // 2
    head, at = tl.arange(0, ROWS)[:, None], tl.arange(0, HALF)[None, :]
    inside, rotated = head < HEADS + 2 * KV, head < HEADS + KV
    here = token * ((HEADS + 2 * KV) * DIM) + head * DIM + at
    a = tl.load(qkv + here, mask=inside, other=0).to(tl.float32)
    b = tl.load(qkv + here + HALF, mask=inside, other=0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
        first = tl.where(head < HEADS, tl.load(q_norm + at), tl.load(k_norm + at)).to(tl.float32)
        second = tl.where(
            head < HEADS, tl.load(q_norm + HALF + at), tl.load(k_norm + HALF + at)
        ).to(tl.float32)
        a = tl.where(rotated, a * scale * first, a)
        b = tl.where(rotated, b * scale * second, b)
    c, s = tl.load(cos + token * HALF + at), tl.load(sin + token * HALF + at)
    x = tl.where(rotated, a * c - b * s, a)
    y = tl.where(rotated, b * c + a * s, b)
    tl.store(out + here, x.to(out.dtype.element_ty), mask=inside)
    tl.store(out + here + HALF, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def rotate_backward(
    d_qkv, qkv, cos, sin, q_norm, k_norm, d_norms, eps, tokens,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """Turn d_qkv, the gradient of `rotate`'s output, into that of its input, in place.

    d_norms is [program, q or k, DIM].
    """
    HALF: tl.constexpr = DIM // 2
    head, at = tl.arange(0, ROWS)[:, None], tl.arange(0, HALF)[None, :]
    inside, rotated = head < HEADS + 2 * KV, head < HEADS + KV
    if NORMED:
        first = tl.where(head < HEADS, tl.load(q_norm + at), tl.load(k_norm + at)).to(tl.float32)
        second = tl.where(
            head < HEADS, tl.load(q_norm + HALF + at), tl.load(k_norm + HALF + at)
        ).to(tl.float32)
        sum_a = tl.zeros([ROWS, HALF], tl.float32)
        sum_b = tl.zeros([ROWS, HALF], tl.float32)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        here = token.to(tl.int64) * ((HEADS + 2 * KV) * DIM) + head * DIM + at
        x = tl.load(d_qkv + here, mask=inside, other=0).to(tl.float32)
        y = tl.load(d_qkv + here + HALF, mask=inside, other=0).to(tl.float32)
        c, s = tl.load(cos + token * HALF + at), tl.load(sin + token * HALF + at)
        d_a, d_b = x * c + y * s, y * c - x * s
        if NORMED:
            a = tl.load(qkv + here, mask=inside, other=0).to(tl.float32)
            b = tl.load(qkv + here + HALF, mask=inside, other=0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
            a, b = a * scale, b * scale
            sum_a += d_a * a
            sum_b += d_b * b
            d_a, d_b = d_a * first, d_b * second
            along = ((tl.sum(d_a * a, 1) + tl.sum(d_b * b, 1)) / DIM)[:, None]
            d_a, d_b = (d_a - a * along) * scale, (d_b - b * along) * scale
        tl.store(d_qkv + here, tl.where(rotated, d_a, x).to(d_qkv.dtype.element_ty), mask=rotated)
        tl.store(
            d_qkv + here + HALF, tl.where(rotated, d_b, y).to(d_qkv.dtype.element_ty), mask=rotated
        )
    if NORMED:
        of_q, of_k = head < HEADS, (head >= HEADS) & rotated
        to = d_norms + tl.program_id(0) * 2 * DIM + tl.arange(0, HALF)
        tl.store(to, tl.sum(tl.where(of_q, sum_a, 0.0), 0))
        tl.store(to + HALF, tl.sum(tl.where(of_q, sum_b, 0.0), 0))
        tl.store(to + DIM, tl.sum(tl.where(of_k, sum_a, 0.0), 0))
        tl.store(to + DIM + HALF, tl.sum(tl.where(of_k, sum_b, 0.0), 0))


@triton.jit
def read_logits(
    logits, targets, logprobs, entropies, logs, kept, peaks, inv_temperature,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Compute the target's log-prob, the entropy and the log2-sum-exp of one row.

    With KEEP, `kept` gets the exponentials of each block, relative to `peaks` [row, block].
    """
    row = tl.program_id(0)
    start = row.to(tl.int64) * VOCABULARY
    top = tl.full([], -1e30, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for n in range(0, VOCABULARY, BLOCK):
        at = n + tl.arange(0, BLOCK)
        inside = at < VOCABULARY
        z = tl.load(logits + start + at, mask=inside, other=-1e30) * (inv_temperature * LOG2_E)
        higher = tl.maximum(top, tl.max(z, 0))
        fade, p = tl.exp2(top - higher), tl.where(inside, tl.exp2(z - higher), 0.0)
        mass = mass * fade + p
        weighted = weighted * fade + p * z
        top = higher
        if KEEP:
            tl.store(kept + start + at, p.to(kept.dtype.element_ty), mask=inside)
            tl.store(peaks + row * tl.cdiv(VOCABULARY, BLOCK) + n // BLOCK, higher)
    total = tl.sum(mass, 0)
    log = top + tl.log2(total)
    target = tl.load(logits + start + tl.load(targets + row)) * (inv_temperature * LOG2_E)
    tl.store(logprobs + row, (target - log) * LN_2)
    tl.store(entropies + row, (log - tl.sum(weighted, 0) / total) * LN_2)
    tl.store(logs + row, log)


@triton.jit
def logits_backward(
    logits, peaks, targets, logprobs, logs, entropies, to_logprobs, to_entropies, d_logits,
    inv_temperature, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, BY_ENTROPY: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one block of a row of logits.

    With KEPT, `logits` are the exponentials that `read_logits` kept, and can be `d_logits`.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    here = row.to(tl.int64) * VOCABULARY + at
    inside, is_target = at < VOCABULARY, at == tl.load(targets + row)
    log = tl.load(logs + row)
    if KEPT:
        scale = tl.load(peaks + row * tl.cdiv(VOCABULARY, BLOCK) + block) - log
        p = tl.load(logits + here, mask=inside, other=0).to(tl.float32)
        log_p = tl.log2(tl.maximum(p, 1e-37)) + scale
        p = p * tl.exp2(scale)
        # Rounded, 1 - p of a likely target would be 0.
        log_target = tl.load(logprobs + row) * LOG2_E
        log_p = tl.where(is_target, log_target, log_p)
        p = tl.where(is_target, tl.exp2(log_target), p)
    else:
        log_p = tl.load(logits + here, mask=inside, other=-1e30) * (inv_temperature * LOG2_E) - log
        p = tl.exp2(log_p)
    upstream = tl.load(to_logprobs + row)
    d = tl.where(is_target, upstream, 0.0) - p * upstream
    if BY_ENTROPY:
        d -= p * (log_p * LN_2 + tl.load(entropies + row)) * tl.load(to_entropies + row)
    tl.store(d_logits + here, (d * inv_temperature).to(d_logits.dtype.element_ty), mask=inside)
