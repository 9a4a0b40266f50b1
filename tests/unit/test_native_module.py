"""The native engine on a Hugging Face module: the tests of `test_native_engine` and a few more."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from paceline.errors import ModelError, SyncError
from paceline.model.engine_weights import ModuleWeights
from paceline.rollout.native import module
from paceline.rollout.native.engine import NativeEngine
from paceline.rollout.native.module import SLACK
from paceline.types import Request, Sampling
from tests.architectures import tiny_architecture
from tests.unit import test_native_engine as engine_tests


def engine_of(
    model: PreTrainedModel, slots: int = 8, max_length: int = 128, **options: Any
) -> NativeEngine:
    return NativeEngine(
        model.config,
        ModuleWeights(model, share=False),
        slots=slots,
        max_length=max_length,
        **options,
    )


@pytest.mark.parametrize(
    "test",
    [
        lambda: engine_tests.test_logprobs_equal_transformers("qwen3"),
        lambda: engine_tests.test_greedy_tokens_equal_transformers_generate("llama3 rope, biases"),
        engine_tests.test_completion_does_not_depend_on_batch_composition,
        engine_tests.test_same_calls_give_same_bits,
        engine_tests.test_samples_of_one_prompt_share_one_prefill_when_slots_are_few,
        engine_tests.test_prefill_is_not_shared_when_weights_changed,
        lambda: engine_tests.test_resumed_completion_equals_uninterrupted_one(7),
        engine_tests.test_tokens_have_logprob_and_version_of_their_weights_after_swap,
        engine_tests.test_abort_returns_partial_completions_and_ignores_unknown_ids,
        engine_tests.test_completion_ends_with_stop_token_or_stop_string,
        engine_tests.test_completion_ends_at_max_length,
        engine_tests.test_step_raises_when_weights_have_diverged,
    ],
)
def test_module_backend_passes_engine_tests(
    test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_tests, "engine_of", engine_of)
    test()


@given(st.lists(engine_tests.ACTION, max_size=25), st.integers(1, 6))
@settings(max_examples=4)
def test_each_request_returns_once_after_any_sequence_of_calls(
    actions: list[tuple[str, int]], slots: int
) -> None:
    model, whole = engine_tests.model_and_completions()
    engine = engine_of(model, slots=slots, max_length=40)
    engine_tests.check_calls(engine, engine_tests.requests(12, new=9), whole, actions, slots)


def test_long_prompts_are_prefilled_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFILL_TOKENS", 8)
    model = engine_tests.build()
    wanted = engine_tests.requests(8)
    done = engine_tests.run(engine_of(model), wanted)
    for request in wanted:
        engine_tests.check_logprobs(model, request, done[request.id])


def test_sequences_continue_when_cache_columns_are_used_up() -> None:
    model = tiny_architecture("gemma2")
    engine = engine_of(model, slots=3, max_length=SLACK)
    # 240 tokens over 3 slots, so that sequences of all lengths are live when rows move.
    wanted = [
        Request(f"r{n}", tuple(range(3, 5 + n % 7)), n, Sampling(10 + 13 * n % 40))
        for n in range(12)
    ]
    done = engine_tests.run(engine, wanted)
    for request in wanted:
        engine_tests.check_logprobs(model, request, done[request.id])


def test_sleep_frees_kv_cache_and_sequences_continue_after_it() -> None:
    model, wanted = engine_tests.build(), engine_tests.requests(4)
    whole = engine_tests.run(engine_of(model), wanted)
    engine = engine_of(model)
    engine_tests.run(engine, wanted, steps=5)
    assert engine.cache_bytes() > 0
    engine.sleep()
    assert engine.cache_bytes() == 0
    assert {
        id: completion.tokens.tolist() for id, completion in engine_tests.run(engine).items()
    } == {id: completion.tokens.tolist() for id, completion in whole.items()}


def test_load_converts_all_weights_or_changes_none() -> None:
    model, other = tiny_architecture("mixtral"), tiny_architecture("mixtral", seed=1)
    weights = ModuleWeights(model, share=False, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in weights.named.items()}
    good = dict(other.state_dict())
    name = next(name for name in good if name.endswith("k_proj.weight"))
    for bad, message in (
        ({key: good[key] for key in good if key != name}, name),
        ({**good, "model.extra": good[name]}, "model.extra"),
        ({**good, name: good[name][:-1]}, "has shape"),
    ):
        with pytest.raises(SyncError, match=message):
            weights.load(bad.items())
    assert all(torch.equal(weights.named[key], tensor) for key, tensor in before.items())
    weights.load(good)
    assert all(torch.equal(weights.named[key], good[key].bfloat16()) for key in before)


def test_engine_rejects_model_without_causal_attention() -> None:
    model = tiny_architecture("olmo2")
    model.config.is_causal = False
    with pytest.raises(
        ModelError,
        match=r"native engine cannot run Olmo2ForCausalLM: .*log-probs differ by",
    ):
        engine_of(model)
