"""The kernels for small batches: as accurate as the ordinary ones, and the same bits each time."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from paceline.rollout.native.engine import NativeEngine
from paceline.types import Request, Sampling
from tests.gpu.test_native_gpu import (
    MODELS,
    VOCABULARY,
    build,
    engine_of,
    logprob_errors,
    mixed,
    run,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a Hopper GPU or newer",
    ),
]


def bfloat16_engine(module: PreTrainedModel, small: bool = True, **options) -> NativeEngine:
    engine = engine_of(module.cuda().bfloat16(), **options)
    backend: Any = engine._backend
    assert backend.forward.small_rows == 16
    if not small:
        without_small_kernels(backend)
    return engine


def without_small_kernels(backend: Any) -> None:
    backend.forward.small_rows = 0
    backend._graphs.clear()  # the constructor captures them with the kernels for small batches


def long() -> list[Request]:
    """Return prompts that attention splits into several chunks."""
    random = np.random.default_rng(1)
    return [
        Request(
            f"r{i}", tuple(random.integers(0, VOCABULARY, 20 + 130 * i).tolist()), i, Sampling(60)
        )
        for i in range(4)
    ]


@pytest.mark.parametrize("requests", [mixed, long])
@pytest.mark.parametrize("name", MODELS)
def test_small_batch_kernels_are_as_accurate_as_ordinary_ones(name: str, requests) -> None:
    module = build(name)
    small = logprob_errors(module, requests(), run(bfloat16_engine(module), requests()))
    ordinary = logprob_errors(
        module, requests(), run(bfloat16_engine(module, small=False), requests())
    )
    assert small.mean() < 1.1 * ordinary.mean()
    assert small.max() < 1.5 * ordinary.max()


def test_small_batch_logprobs_are_close_to_float32_when_model_is_untrained() -> None:
    module = build("qwen2, 7 heads to a kv head, tied", seed=2)
    found = logprob_errors(module, mixed(), run(bfloat16_engine(module), mixed()))
    assert found.mean() < 0.02 and found.max() < 0.2, (found.mean(), found.max())


def test_same_requests_give_same_bits() -> None:
    engine = bfloat16_engine(build())
    first, second = run(engine, long()), run(engine, long())
    for request in long():
        assert first[request.id].tokens.tolist() == second[request.id].tokens.tolist()
        assert first[request.id].logprobs.tobytes() == second[request.id].logprobs.tobytes()


def test_completions_stay_the_same_when_bursts_are_brief() -> None:
    module = build()
    brief = engine_of(module)
    brief.expect_sync()
    expected, done = run(engine_of(module), mixed()), run(brief, mixed())
    assert {id: completion.tokens.tolist() for id, completion in done.items()} == {
        id: c.tokens.tolist() for id, c in expected.items()
    }
