"""FP8 on a GPU: the log-probs are those of the CPU's FP8, and all kernels use the same numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from paceline.model.fp8 import FP8, dequantized, quantize
from paceline.model.fp8_weights import fp8_weights
from paceline.model.weights import DecoderWeights, Linear
from paceline.rollout.native.engine import NativeEngine
from paceline.types import Completion, Request, Sampling
from tests.gpu.test_native_gpu import (
    LENGTH,
    MODELS,
    build,
    engine_of,
    logprob_errors,
    mixed,
    run,
)
from tests.gpu.test_small_gpu import without_small_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a GPU that converts FP8",
    ),
]

VARIANTS = {"kv": (True, False), "weights": (False, True), "both": (True, True)}


def fp8_engine(
    module: PreTrainedModel, variant: str, slots: int = 16, device: str = "cuda", **options
) -> NativeEngine:
    kv, quantized = VARIANTS[variant]
    weights = DecoderWeights.from_module(module.to(device), share=False)
    return NativeEngine(
        module.config,
        fp8_weights(weights) if quantized else weights,
        slots=slots,
        max_length=LENGTH,
        kv_dtype=FP8 if kv else None,
        **options,
    )


def errors(module: PreTrainedModel, done: dict[str, Completion]) -> np.ndarray:
    """Return the distance of all log-probs to those of the unrounded model in float32."""
    return logprob_errors(module, mixed(), done)


@torch.no_grad()
def rounded_weights(module: PreTrainedModel) -> PreTrainedModel:
    """Return the module with the numbers that FP8 makes of its linear layers."""
    for name, weight in module.named_parameters():
        if name.endswith("_proj.weight"):
            target = torch.empty_like(weight, dtype=FP8)
            scale = torch.empty(len(weight), device=weight.device)
            quantize(weight, target, scale)
            weight.copy_(dequantized(target, scale, weight.dtype))
    return module


# 3 and 17 rows: one block of rows; 200: several; 300: weights are converted first.
@pytest.mark.parametrize("rows", [3, 17, 200, 300])
@pytest.mark.parametrize(("outputs", "width"), [(1152, 896), (896, 4864), (9728, 896), (80, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmul_equals_that_of_dequantized_weights(
    rows: int, outputs: int, width: int, dtype: torch.dtype
) -> None:
    from paceline.rollout.native import fp8_matmul

    torch.manual_seed(0)
    weight = torch.empty(outputs, width, dtype=FP8, device="cuda")
    scale = torch.empty(outputs, device="cuda")
    quantize(torch.randn(outputs, width, device="cuda") * width**-0.5, weight, scale)
    bias = torch.randn(outputs, device="cuda").to(dtype)
    x = torch.randn(rows, width, device="cuda").to(dtype)
    exact = x.double() @ dequantized(weight, scale, torch.float64).t() + bias
    atol = 1e-4 if dtype == torch.float32 else 0.08  # outputs above 8 have steps of 0.06
    found = fp8_matmul.apply(Linear(weight, bias, scale), x)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=atol)
    residual = torch.randn(rows, outputs, device="cuda").to(dtype)
    total = residual.double() + exact
    fp8_matmul.add_to(Linear(weight, bias, scale), residual, x)
    torch.testing.assert_close(residual.double(), total, rtol=0, atol=atol)


@pytest.mark.parametrize("slots", [16, 64])
@pytest.mark.parametrize("name", MODELS)
def test_fp8_weights_give_logprobs_of_rounded_weights(name: str, slots: int) -> None:
    module = build(name)
    done = run(fp8_engine(module, "weights", slots), mixed())
    # The factors are powers of two, so only the order of sums differs.
    assert errors(rounded_weights(module), done).max() < 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MODELS)
def test_gpu_has_the_precision_of_cpu(name: str, variant: str) -> None:
    module = build(name)
    cpu = errors(module, run(fp8_engine(module.cpu(), variant, device="cpu"), mixed()))
    gpu = errors(module, run(fp8_engine(module, variant), mixed()))
    assert 0.67 * cpu.mean() < gpu.mean() < 1.5 * cpu.mean()


@pytest.mark.parametrize("slots", [16, 64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_fp8_logprobs_of_bfloat16_engine_are_close_to_float32(variant: str, slots: int) -> None:
    """The bound is five times that of bfloat16 alone; a wrong layout differs by more than 1."""
    module = build("qwen2, 7 heads to a kv head, tied", seed=2).bfloat16()
    found = errors(module, run(fp8_engine(module, variant, slots), mixed()))
    assert found.mean() < 0.1 and found.max() < 1.0, (found.mean(), found.max())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MODELS)
def test_small_batch_kernels_are_as_accurate_as_ordinary_ones(name: str, variant: str) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a Hopper GPU or newer")
    module = build(name).cuda().bfloat16()
    found = []
    for small in (True, False):
        engine = fp8_engine(module, variant)
        backend: Any = engine._backend
        assert backend.forward.small_rows == 16
        if not small:
            without_small_kernels(backend)
        found.append(run(engine, mixed()))
    small_errors, ordinary = (errors(module, done) for done in found)
    assert small_errors.mean() < 1.1 * ordinary.mean()


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_do_not_depend_on_batch_size(variant: str) -> None:
    """In float32, sums in another order do not change a token, unless a key is rounded otherwise;
    therefore with the cache in FP8, most completions must be equal."""
    module = build()
    wanted = [Request(f"r{i}", (1, 2, 3, i), i, Sampling(40, temperature=0.0)) for i in range(48)]
    many = run(fp8_engine(module, variant, slots=48), wanted)
    few = run(fp8_engine(module, variant, slots=3), wanted)
    equal = [many[r.id].tokens.tolist() == few[r.id].tokens.tolist() for r in wanted]
    assert all(equal) if variant == "weights" else sum(equal) > 40


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_requests_give_same_bits(variant: str) -> None:
    engine = fp8_engine(build().bfloat16(), variant)
    first, second = run(engine, mixed()), run(engine, mixed())
    assert all(first[r.id].logprobs.tobytes() == second[r.id].logprobs.tobytes() for r in mixed())


@pytest.mark.parametrize("streamed", [False, True])
def test_existing_graphs_use_new_weights(streamed: bool) -> None:
    old, new = build(seed=0), build(seed=1).cuda()
    engine = fp8_engine(old, "both")
    run(engine, mixed())
    tensors = dict(new.named_parameters())
    engine.load(iter(tensors.items()) if streamed else tensors, 1)
    done, expected = run(engine, mixed()), run(fp8_engine(new, "both"), mixed())
    for request in mixed():
        assert done[request.id].tokens.tolist() == expected[request.id].tokens.tolist()


def test_fp8_cache_has_half_the_bytes_of_bfloat16() -> None:
    module = build().bfloat16()
    assert 2 * fp8_engine(module, "kv").cache_bytes() == engine_of(module).cache_bytes()


def test_sequences_continue_after_sleep() -> None:
    module = build()
    expected, engine = run(fp8_engine(module, "both"), mixed()), fp8_engine(module, "both")
    done = run(engine, mixed(), steps=3)
    engine.sleep()
    done |= run(engine, [])
    assert set(done) == set(expected)
    # The KV cache of a prefill and that of decode steps may round a key differently.
    equal = [done[id].tokens.tolist() == expected[id].tokens.tolist() for id in expected]
    assert np.mean(equal) > 0.8


def test_weights_in_fp8_stay_bfloat16_where_they_must() -> None:
    weights = fp8_weights(DecoderWeights.from_module(build().cuda().bfloat16(), share=False))
    assert weights.embedding.dtype == weights.head.dtype == weights.norm.dtype == torch.bfloat16
    assert weights.layers[0].qkv.weight.dtype == FP8
