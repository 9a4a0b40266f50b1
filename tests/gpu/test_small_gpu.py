"""The kernels for few rows: as near to float32 as the ordinary ones, the same bits every time, whatever the model's shape."""

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from paceline.rollout.native.engine import NativeEngine
from paceline.types import Completion, Request, Sampling
from tests.gpu.test_native_gpu import MODELS, VOCABULARY, build, engine_of, mixed, off, run, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a Hopper GPU or newer",
    ),
]


def narrow_engine(module: PreTrainedModel, few: bool = True, **options) -> NativeEngine:
    engine = engine_of(module.cuda().bfloat16(), **options)
    forward = engine._backend.forward  # type: ignore[attr-defined]
    assert forward.few == 16
    forward.few *= few
    return engine


def errors(
    module: PreTrainedModel, wanted: list[Request], done: dict[str, Completion]
) -> np.ndarray:
    exact = module.float()
    return np.concatenate(
        [off(exact, request, done[request.id]) for request in wanted if whole(request)]
    )


def long() -> list[Request]:
    """Prompts that attention looks at in several pieces."""
    random = np.random.default_rng(1)
    return [
        Request(
            f"r{i}", tuple(random.integers(0, VOCABULARY, 20 + 130 * i).tolist()), i, Sampling(60)
        )
        for i in range(4)
    ]


@pytest.mark.parametrize("requests", [mixed, long])
@pytest.mark.parametrize("name", MODELS)
def test_few_rows_are_as_near_to_float32_as_many(name: str, requests) -> None:
    module = build(name)
    few = errors(module, requests(), run(narrow_engine(module), requests()))
    many = errors(module, requests(), run(narrow_engine(module, few=False), requests()))
    assert few.mean() < 1.1 * many.mean() and few.max() < 1.5 * many.max(), (
        few.mean(),
        many.mean(),
        few.max(),
        many.max(),
    )


def test_few_rows_of_a_model_as_it_is_initialised_stay_within_the_bounds() -> None:
    module = build("qwen2, 7 heads to a kv head, tied", seed=2)
    few = errors(module, mixed(), run(narrow_engine(module), mixed()))
    assert few.mean() < 0.02 and few.max() < 0.2, (few.mean(), few.max())


def test_the_same_requests_give_the_same_bits() -> None:
    engine = narrow_engine(build())
    first, second = run(engine, long()), run(engine, long())
    for request in long():
        assert first[request.id].tokens.tolist() == second[request.id].tokens.tolist()
        assert first[request.id].logprobs.tobytes() == second[request.id].logprobs.tobytes()


def test_an_engine_with_brief_bursts_gives_the_same_answers() -> None:
    module = build()
    expected, done = run(engine_of(module), mixed()), run(engine_of(module, brief=True), mixed())
    assert {id: completion.tokens.tolist() for id, completion in done.items()} == {
        id: c.tokens.tolist() for id, c in expected.items()
    }
