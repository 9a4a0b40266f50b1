"""The FP8 kernels in Triton's interpreter, which needs no GPU.

    TRITON_INTERPRET=1 python -m pytest -n0 tests/unit/test_fp8_kernels.py

The interpreter is chosen when Triton is imported, so these tests are skipped without the variable.
"""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from paceline.model.fp8 import FP8, dequantized, quantize, rounded
from paceline.model.weights import Linear

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


@pytest.fixture(autouse=True)
def correct_rounding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Round to FP8 with torch: the interpreter does not carry into the exponent."""
    language = pytest.importorskip("triton.language")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    convert = interpreter._convert_float

    def convert_float(values, source, target, mode):
        if target == language.float8e4nv and source == language.float32:
            numbers = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
            return numbers.to(FP8).view(torch.uint8).numpy().reshape(values.shape)
        return convert(values, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
    yield


def linear(outputs: int, width: int, biased: bool) -> Linear:
    torch.manual_seed(0)
    weight, scale = torch.empty(outputs, width, dtype=FP8), torch.empty(outputs)
    quantize(torch.randn(outputs, width) * torch.logspace(-2, 1, outputs)[:, None], weight, scale)
    return Linear(weight, torch.randn(outputs) if biased else None, scale)


# One block of rows and several, with and without splits of the inputs, and weights that are
# converted first.
@pytest.mark.parametrize("rows", [3, 17, 150, 300])
@pytest.mark.parametrize(("outputs", "width"), [(80, 96), (64, 1200)])
@pytest.mark.parametrize("biased", [False, True])
def test_matmul_equals_that_of_dequantized_weights(
    rows: int, outputs: int, width: int, biased: bool
) -> None:
    from paceline.rollout.native import fp8_matmul

    one, x = linear(outputs, width, biased), torch.randn(rows, width)
    assert one.scale is not None
    expected = torch.nn.functional.linear(x, dequantized(one.weight, one.scale, x.dtype), one.bias)
    torch.testing.assert_close(fp8_matmul.apply(one, x), expected, rtol=1e-4, atol=1e-3)
    residual = torch.randn(rows, outputs)
    total = residual + expected
    fp8_matmul.add_to(one, residual, x)
    torch.testing.assert_close(residual, total, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("normed", [False, True])
def test_cache_gets_rounded_keys_and_values(normed: bool) -> None:
    from paceline.rollout.native import kernels

    heads, kv_heads, dim, tokens = 4, 2, 16, 5
    torch.manual_seed(0)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim) * 100
    angles = torch.randn(tokens, dim // 2)
    positions = torch.arange(tokens, dtype=torch.int32)
    norm = torch.rand(dim)
    caches = [torch.zeros(2, kv_heads, 2, kernels.PAGE, dim, dtype=t) for t in (torch.float32, FP8)]
    for cache in caches:
        kernels.rotate_and_cache[(tokens,)](
            qkv.clone(), angles.cos(), angles.sin(), positions, positions + kernels.PAGE, cache,
            norm, norm, 1e-6, HEADS=heads, KV=kv_heads, DIM=dim, ROWS=8, NORMED=normed,
        )  # fmt: skip
    exact, fp8 = caches
    assert exact[1, :, :, :tokens].count_nonzero() == tokens * kv_heads * 2 * dim
    assert torch.equal(fp8.float(), rounded(exact, FP8))
