"""What the engine does with our own forward pass it also does through a module: the same tests, on the other kind of weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from paceline.errors import ModelError, SyncError
from paceline.model.engine_weights import ModuleWeights
from paceline.rollout.native import module
from paceline.rollout.native.engine import NativeEngine
from paceline.rollout.native.module import SLACK
from paceline.types import Request, Sampling
from tests.architectures import tiny_architecture
from tests.unit import test_native_engine as own


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


@pytest.fixture(autouse=True)
def _through_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "engine_of", engine_of)


@pytest.mark.parametrize(
    "test",
    [
        lambda: own.test_logprobs_are_those_of_transformers("qwen3"),
        lambda: own.test_greedy_is_transformers_generate_token_for_token("llama3 rope, biases"),
        own.test_an_answer_does_not_depend_on_what_else_is_in_the_batch,
        own.test_the_same_calls_give_the_same_bits,
        own.test_samples_of_one_prompt_share_one_prefill_also_when_they_come_in_turns,
        own.test_a_prefill_is_not_shared_across_a_change_of_weights,
        lambda: own.test_an_interrupted_and_resumed_answer_is_the_uninterrupted_one(7),
        own.test_after_a_swap_each_token_has_the_logprob_and_version_of_the_weights_that_made_it,
        own.test_abort_returns_what_there_is_and_ignores_unknown_ids,
        own.test_stop_tokens_and_stop_strings_end_an_answer_and_stay_in_it,
        own.test_answers_end_where_the_engine_ends,
        own.test_diverged_weights_are_an_error_not_an_answer,
    ],
)
def test_what_holds_for_our_own_forward_pass_holds_for_a_module(test: Callable[[], None]) -> None:
    test()


@pytest.mark.parametrize("seed", range(4))
def test_every_request_comes_back_exactly_once_whatever_is_done_to_it(seed: int) -> None:
    random = np.random.default_rng(seed)
    kinds = random.choice(
        ["submit", "step", "abort", "interrupt"], 25, p=[0.3, 0.5, 0.1, 0.1]
    ).tolist()
    actions = [(kind, int(random.integers(1, 6))) for kind in kinds]
    own.test_every_request_comes_back_exactly_once_whatever_is_done_to_it.hypothesis.inner_test(
        actions, int(random.integers(1, 6))
    )


def test_long_prompts_are_prefilled_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFILL_TOKENS", 8)
    model = own.build()
    wanted = own.requests(8)
    done = own.run(engine_of(model), wanted)
    for request in wanted:
        own.check_logprobs(model, request, done[request.id])


def test_rows_move_back_when_the_columns_are_used_up_and_sequences_of_every_age_go_on() -> None:
    model = tiny_architecture("gemma2")
    engine = engine_of(model, slots=3, max_length=SLACK)
    wanted = [
        Request(f"r{n}", tuple(range(3, 5 + n % 7)), n, Sampling(10 + 13 * n % 40))
        for n in range(12)
    ]  # 240 tokens by turns
    done = own.run(engine, wanted)
    for request in wanted:
        own.check_logprobs(model, request, done[request.id])


def test_asleep_it_holds_no_keys_and_values_and_awake_goes_on() -> None:
    model, wanted = own.build(), own.requests(4)
    whole = own.run(engine_of(model), wanted)
    engine = engine_of(model)
    own.run(engine, wanted, steps=5)
    assert engine.cache_bytes() > 0
    engine.sleep()
    assert engine.cache_bytes() == 0
    assert {id: completion.tokens.tolist() for id, completion in own.run(engine).items()} == {
        id: completion.tokens.tolist() for id, completion in whole.items()
    }


def test_new_weights_are_taken_whole_or_not_at_all_and_in_the_engines_own_type() -> None:
    model, other = tiny_architecture("mixtral"), tiny_architecture("mixtral", seed=1)
    weights = ModuleWeights(model, share=False, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in weights.named.items()}
    good = dict(other.state_dict())
    name = next(name for name in good if name.endswith("k_proj.weight"))
    for bad, says in (
        ({key: good[key] for key in good if key != name}, name),
        ({**good, "model.extra": good[name]}, "model.extra"),
        ({**good, name: good[name][:-1]}, "has shape"),
    ):
        with pytest.raises(SyncError, match=says):
            weights.load(bad.items())
    assert all(torch.equal(weights.named[key], tensor) for key, tensor in before.items())
    weights.load(good)
    assert all(torch.equal(weights.named[key], good[key].bfloat16()) for key in before)


def test_a_model_that_looks_ahead_is_refused() -> None:
    model = tiny_architecture("olmo2")
    model.config.is_causal = False
    with pytest.raises(
        ModelError,
        match=r"Olmo2ForCausalLM cannot be used by the native engine: .*log-probs differ by",
    ):
        engine_of(model)
