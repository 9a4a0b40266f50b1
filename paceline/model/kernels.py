"""Triton kernels that the rollout engine and the trainer share.

Importing this module needs Triton, which is only installed on machines with a GPU.
"""

# mypy: ignore-errors
# (Triton kernels share only the syntax of Python)

import triton
import triton.language as tl


@triton.jit
def silu_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store silu(gate) * up; a row of `gate_up` has the gates first."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + at, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0).to(tl.float32)
    tl.store(
        out + row * WIDTH + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside
    )
