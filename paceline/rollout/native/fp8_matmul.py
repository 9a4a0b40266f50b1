"""Matmuls of the native engine with FP8 weights and activations in the compute dtype, on a GPU.

Up to MAX_ROWS rows, a matmul is bound by reading its weights: a Triton kernel reads them in FP8 and
converts them in registers. Larger ones are bound by arithmetic: the weights are converted once, and
cuBLAS multiplies. Batches that `small_batch` supports do not come here.
"""

# mypy: ignore-errors
# (Triton kernels share only the syntax of Python)

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.operations import next_power_of_two
from paceline.model.weights import Linear

MAX_ROWS = 256
TILE, PART = 64, 128  # outputs of a program, and inputs that it reads at a time
PROGRAMS = 264  # two for each multiprocessor of an H200
LEAST = 4 * PART  # inputs of a program


def apply(linear: Linear, x: Tensor) -> Tensor:
    """Return linear(x)."""
    if len(x) > MAX_ROWS:
        return torch.nn.functional.linear(x, _converted(linear, x.dtype), linear.bias)
    out = torch.empty(len(x), len(linear.weight), dtype=x.dtype, device=x.device)
    _multiply(linear, x, out, add=False)
    return out


def add_to(linear: Linear, residual: Tensor, x: Tensor) -> None:
    """Compute residual += linear(x)."""
    if len(x) > MAX_ROWS:
        residual.addmm_(x, _converted(linear, x.dtype).t())
        if linear.bias is not None:
            residual.add_(linear.bias)
    else:
        _multiply(linear, x, residual, add=True)


def _converted(linear: Linear, dtype: torch.dtype) -> Tensor:
    """Return the weights in `dtype`. This is exact, because the factors are powers of two."""
    outputs, width = linear.weight.shape
    result = torch.empty(outputs, width, dtype=dtype, device=linear.weight.device)
    convert[(outputs, -(-width // 2048))](
        linear.weight, linear.scale, result, WIDTH=width, BLOCK=2048
    )
    return result


def _multiply(linear: Linear, x: Tensor, out: Tensor, add: bool) -> None:
    (rows, width), outputs = x.shape, len(linear.weight)
    block = max(16, min(128, next_power_of_two(rows)))
    blocks, tiles = -(-rows // block), -(-outputs // TILE)
    # Few tiles do not fill the GPU, so several programs share the inputs of each.
    splits = max(1, min(PROGRAMS // (tiles * blocks), width // LEAST))
    bias = linear.weight if linear.bias is None else linear.bias
    shared = {"OUT": outputs, "BIASED": linear.bias is not None, "ADD": add, "SPLITS": splits}
    part = torch.empty(splits, rows, outputs, device=x.device) if splits > 1 else out
    multiply[(tiles, blocks, splits)](
        x, linear.weight, linear.scale, bias, out, part, rows,
        WIDTH=width, ROWS=block, TILE=TILE, PART=PART, num_stages=3, **shared,
    )  # fmt: skip
    if splits > 1:
        join[(rows, -(-outputs // 1024))](part, linear.scale, bias, out, rows, BLOCK=1024, **shared)


@triton.jit
def convert(weight, scale, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(weight + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(scale + row)
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store(
    value, scale, bias, there, n, inside, OUT: tl.constexpr, BIASED: tl.constexpr, ADD: tl.constexpr
):
    """Store the scaled sums of the outputs n, or add them to what is there."""
    value = value * tl.load(scale + n, mask=n < OUT, other=0)
    if BIASED:
        value += tl.load(bias + n, mask=n < OUT, other=0).to(tl.float32)
    if ADD:
        value += tl.load(there, mask=inside, other=0).to(tl.float32)
    tl.store(there, value.to(there.dtype.element_ty), mask=inside)


@triton.jit
def multiply(
    x, weight, scale, bias, out, part, rows,
    WIDTH: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PART: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Multiply rows of x with TILE rows of the weight.

    With several splits, a program stores the sum over its inputs in `part`, and `join` adds them in
    a fixed order.
    """
    n = (tl.program_id(0) * TILE + tl.arange(0, TILE))[None, :]
    r = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    split = tl.program_id(2)
    EACH: tl.constexpr = (WIDTH + SPLITS * PART - 1) // (SPLITS * PART) * PART
    k = tl.arange(0, PART)
    total = tl.zeros([ROWS, TILE], tl.float32)
    for i in range(EACH // PART):
        at = split * EACH + i * PART + k
        inputs = tl.load(
            x + r.to(tl.int64) * WIDTH + at[None, :],
            mask=(r < rows) & (at[None, :] < WIDTH),
            other=0,
        )
        tile = tl.load(
            weight + n.to(tl.int64) * WIDTH + at[:, None],
            mask=(n < OUT) & (at[:, None] < WIDTH),
            other=0.0,
        )
        total = tl.dot(inputs, tile.to(inputs.dtype), total, input_precision="ieee")
    inside = (r < rows) & (n < OUT)
    if SPLITS == 1:
        _store(total, scale, bias, out + r.to(tl.int64) * OUT + n, n, inside, OUT, BIASED, ADD)
    else:
        tl.store(part + (split * rows + r).to(tl.int64) * OUT + n, total, mask=inside)


@triton.jit
def join(
    part, scale, bias, out, rows,
    OUT: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(part + (split * rows + row) * OUT + n, mask=n < OUT, other=0)
    _store(total, scale, bias, out + row * OUT + n, n, n < OUT, OUT, BIASED, ADD)
