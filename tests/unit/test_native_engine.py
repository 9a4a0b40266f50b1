"""The native engine against plain transformers: the same tokens and log-probs throughout."""

from collections.abc import Iterable
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from paceline.errors import RolloutError
from paceline.model.weights import DecoderWeights
from paceline.rollout.native import backend
from paceline.rollout.native.engine import NativeEngine
from paceline.rollout.native.model import Decoder
from paceline.types import Completion, Finish, Request, Sampling

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 60, "max_position_embeddings": 256,
    "initializer_range": 0.25,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "rope_theta": 10000.0, "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama tied": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama3 rope, biases": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True),
    ),
    "llama yarn": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=YARN)),
    "mistral wide heads": (
        MistralForCausalLM,
        MistralConfig(**SHAPE, sliding_window=None, head_dim=16),
    ),
    "qwen2 tied": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen2 untied": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=False)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=24)),
    "one kv head": (Qwen2ForCausalLM, Qwen2Config(**{**SHAPE, "num_key_value_heads": 1})),
}
Results = dict[str, Completion]


def build(name: str = "qwen2 tied", seed: int = 0) -> PreTrainedModel:
    kind, config = MODELS[name]
    torch.manual_seed(seed)
    module = kind(config).eval()
    # Biases and norms start at 0 and 1, which would hide bugs.
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    return module


def engine_of(
    module: PreTrainedModel, slots: int = 8, max_length: int = 128, **options
) -> NativeEngine:
    return NativeEngine(
        module.config,
        DecoderWeights.from_module(module, share=False),
        slots=slots,
        max_length=max_length,
        **options,
    )


def requests(n: int, new: int = 20, seed: int = 0, **sampling) -> list[Request]:
    random = np.random.default_rng(seed)
    prompts = [tuple(random.integers(0, 60, random.integers(1, 30)).tolist()) for _ in range(n)]
    return [
        Request(f"r{i}", prompt, 100 + i, Sampling(new, **sampling))
        for i, prompt in enumerate(prompts)
    ]


def run(engine: NativeEngine, wanted: Iterable[Request] = (), steps: int = 10_000) -> Results:
    engine.submit(list(wanted))
    done: Results = {}
    while engine.has_work and steps:
        done |= dict(engine.step())
        steps -= 1
    return done


def check_logprobs(module: PreTrainedModel, request: Request, completion: Completion) -> None:
    tokens = torch.tensor([[*request.prompt, *completion.tokens.tolist()]])
    with torch.no_grad():
        logits = module(tokens).logits[0, len(request.prompt) - 1 : -1] / (
            request.sampling.temperature or 1.0
        )
    expected = logits.log_softmax(-1).gather(1, tokens[0, len(request.prompt) :, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=1e-4)


def same(a: Completion, b: Completion) -> None:
    assert a.tokens.tolist() == b.tokens.tolist() and a.finish == b.finish
    # Matmuls of other sizes round differently: by up to 1.2e-5 here, depending on the CPU.
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=5e-5)


@pytest.mark.parametrize("name", ["qwen2 tied", "one kv head"])
def test_logprobs_equal_transformers_when_few_of_many_rows_are_long(name: str) -> None:
    module = build(name)
    wanted = [
        Request(f"{n}", (5, 6, n), n, Sampling(200 if n % 20 == 0 else 12)) for n in range(60)
    ]
    wanted += [Request(f"late {n}", (7, n), n, Sampling(12)) for n in range(60)]
    engine = engine_of(module, slots=60, max_length=224)
    done = run(engine, wanted)
    for request in wanted:
        check_logprobs(module, request, done[request.id])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("packing")
def test_logprobs_equal_transformers(name: str) -> None:
    module = build(name)
    wanted = [*requests(12, new=40), Request("cool", (5, 6), 1, Sampling(30, temperature=0.6))]
    done = run(engine_of(module, slots=5), wanted)
    for request in wanted:
        assert len(done[request.id]) == request.sampling.max_new_tokens
        assert done[request.id].finish == Finish.LENGTH
        check_logprobs(module, request, done[request.id])


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_transformers_generate(name: str) -> None:
    module = build(name)
    wanted = requests(3, new=20, temperature=0.0)
    done = run(engine_of(module), wanted)
    for request in wanted:
        prompt = torch.tensor([request.prompt])
        out = module.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
        )
        assert done[request.id].tokens.tolist() == out[0, len(request.prompt) :].tolist()
        check_logprobs(module, request, done[request.id])


def test_completion_does_not_depend_on_batch_composition() -> None:
    module = build()
    wanted = requests(8)
    together = run(engine_of(module, slots=8), wanted)
    for slots in (1, 3):
        done = run(engine_of(module, slots=slots), wanted[::-1])
        for request in wanted:
            same(done[request.id], together[request.id])


def test_norm_of_row_has_same_bits_in_any_batch() -> None:
    module = build()
    decoder = Decoder(
        module.config, DecoderWeights.from_module(module, share=False), slots=4, max_length=8
    )
    generator, weight = torch.Generator().manual_seed(0), decoder.weights.norm
    rows = torch.randn(100, module.config.hidden_size, generator=generator)
    together = decoder._norm(rows, weight)
    for n in range(1, 40):
        assert torch.equal(decoder._norm(rows[n : 2 * n], weight), together[n : 2 * n])


def test_same_calls_give_same_bits() -> None:
    module = build()
    first, second = (run(engine_of(module, slots=5), requests(12)) for _ in range(2))
    assert all(first[id].logprobs.tobytes() == second[id].logprobs.tobytes() for id in first)


def test_samples_of_one_prompt_share_one_prefill_when_slots_are_few() -> None:
    module = build()
    prompt = tuple(range(1, 41))
    group = [Request(f"g{i}", prompt, i, Sampling(10 + i)) for i in range(9)]
    engine = engine_of(module, slots=4)
    done = run(engine, group)
    assert engine.tokens_prefilled == len(prompt) - 1
    assert len({tuple(done[request.id].tokens[:8].tolist()) for request in group}) > 1
    for request in group:
        check_logprobs(module, request, done[request.id])


def test_prefill_is_not_shared_when_weights_changed() -> None:
    old, new = build(seed=0), build(seed=1)
    engine = engine_of(old, slots=2)
    prompt = tuple(range(1, 41))
    run(engine, [Request("a", prompt, 0, Sampling(50))], steps=2)
    engine.load(new.state_dict().items(), 1)
    late = Request("b", prompt, 1, Sampling(10))
    check_logprobs(new, late, run(engine, [late])["b"])


def test_long_prompts_are_prefilled_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "PREFILL_TOKENS", 16)
    module = build()
    random = np.random.default_rng(3)
    wanted = [
        Request(f"r{n}", tuple(random.integers(0, 60, n).tolist()), n, Sampling(8))
        for n in (1, 2, 5, 6, 7, 16, 17, 18, 33, 100)
    ]
    done = run(engine_of(module, slots=10), wanted)
    for request in wanted:
        check_logprobs(module, request, done[request.id])


@pytest.mark.parametrize("at", [1, 7, 19])
def test_resumed_completion_equals_uninterrupted_one(at: int) -> None:
    module = build("qwen3")
    wanted = requests(10)
    whole = run(engine_of(module), wanted)
    engine = engine_of(module)
    done = run(engine, wanted, steps=at)
    stopped = dict(engine.interrupt())
    assert not engine.has_work and {c.finish for c in stopped.values()} == {Finish.INTERRUPT}
    lengths = [len(c) for c in stopped.values()]
    assert (max(lengths), min(lengths)) == (at, 0)
    resumed = [
        Request(r.id, r.prompt, r.seed, r.sampling, stopped[r.id])
        for r in wanted
        if r.id in stopped
    ]
    done |= run(engine, resumed)
    for request in wanted:
        same(done[request.id], whole[request.id])
        check_logprobs(module, request, done[request.id])


def test_submit_completes_request_when_partial_is_already_complete() -> None:
    engine = engine_of(build(), decode=lambda tokens: "".join(chr(65 + t) for t in tokens))

    def partial(*tokens: int) -> Completion:
        n = len(tokens)
        return Completion(
            np.array(tokens, np.int32),
            np.full(n, -1, np.float32),
            np.zeros(n, np.int32),
            Finish.INTERRUPT,
        )

    engine.submit([
        Request("length", (1, 2), 0, Sampling(3), partial(4, 5, 6)),
        Request("token", (1, 2), 0, Sampling(9, stop_token_ids=(8, 6)), partial(4, 5, 6)),
        Request("string", (1, 2), 0, Sampling(9, stop=("FG",)), partial(4, 5, 6)),
        Request("full", tuple(range(50)) * 2, 0, Sampling(500), partial(*range(28))),
        Request("no tokens", (1,), 0, Sampling(0)),
    ])  # fmt: skip
    done = dict(engine.step())
    assert {id: str(c.finish) for id, c in done.items()} == {
        "length": "length",
        "token": "stop",
        "string": "stop",
        "full": "length",
        "no tokens": "length",
    }
    assert done["token"].tokens.tolist() == [4, 5, 6]
    assert (engine.tokens_sampled, engine.has_work) == (0, False)


@pytest.mark.usefixtures("packing")
def test_tokens_have_logprob_and_version_of_their_weights_after_swap() -> None:
    old, new = build(seed=0), build(seed=1)
    engine = engine_of(old, version=4)
    wanted = requests(8)
    run(engine, wanted, steps=7)
    engine.load(new.state_dict().items(), 5)
    done = run(engine)
    for request in wanted:
        completion, prompt = done[request.id], len(request.prompt)
        assert completion.versions.tolist() == [4] * 7 + [5] * 13
        tokens = torch.tensor([[*request.prompt, *completion.tokens.tolist()]])
        with torch.no_grad():
            cache = DynamicCache(config=old.config)
            before = old(tokens[:, : prompt + 6], past_key_values=cache).logits[0, prompt - 1 :]
            after = new(tokens[:, prompt + 6 : -1], past_key_values=cache).logits[0]
        logprobs = torch.cat((before, after)).log_softmax(-1).gather(1, tokens[0, prompt:, None])
        np.testing.assert_allclose(completion.logprobs, logprobs[:, 0].numpy(), atol=1e-4)


def test_abort_returns_partial_completions_and_ignores_unknown_ids() -> None:
    module = build()
    engine = engine_of(module, slots=2)
    wanted = requests(4)
    run(engine, wanted, steps=5)
    gone = dict(engine.abort(["r0", "r3", "unknown"]))
    assert {id: (len(c), str(c.finish)) for id, c in gone.items()} == {
        "r0": (5, "abort"),
        "r3": (0, "abort"),
    }
    check_logprobs(module, wanted[0], gone["r0"])
    assert (engine.running, engine.waiting) == (1, 1)
    done = run(engine)
    assert set(done) == {"r1", "r2"}
    check_logprobs(module, wanted[1], done["r1"])
    assert engine.abort(["r0"]) == []


def test_completion_ends_with_stop_token_or_stop_string() -> None:
    module = build()
    text = "".join(chr(40 + token) for token in range(60))
    engine = engine_of(module, decode=lambda tokens: "".join(text[token] for token in tokens))
    plain = run(engine, requests(8, new=30))
    stop = int(plain["r0"].tokens[12])
    pair = "".join(text[token] for token in plain["r1"].tokens[9:11])
    for sampling in ({"stop_token_ids": (59, stop, 58)}, {"stop": ("absent", pair)}):
        done = run(engine, requests(8, new=30, **sampling))
        assert "stop" in {str(completion.finish) for completion in done.values()}
        for id, completion in done.items():
            whole = plain[id].tokens.tolist()
            if "stop" in sampling:
                ends = [
                    n for n in range(2, 31) if pair == "".join(text[t] for t in whole[n - 2 : n])
                ]
            else:
                ends = [n for n in range(1, 31) if whole[n - 1] in sampling["stop_token_ids"]]
            assert completion.tokens.tolist() == whole[: min(ends, default=30)]
            assert completion.finish == (Finish.STOP if ends else Finish.LENGTH)


def test_completion_ends_at_max_length() -> None:
    done = run(engine_of(build(), max_length=24), [Request("r", tuple(range(20)), 0, Sampling(50))])
    assert (len(done["r"]), done["r"].finish) == (4, Finish.LENGTH)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("r", tuple(range(24)), 0, Sampling(1)), "max_length 24"),
        (Request("r", (), 0, Sampling(1)), "empty"),
        (Request("r", (60,), 0, Sampling(1)), "outside 0..59"),
        (Request("r", (1,), 0, Sampling(1, stop=("x",))), "decode"),
        (Request("r", (1,), 0, Sampling(1, top_p=0.0)), "top_p"),
        (Request("r", (1,), 0, Sampling(1, temperature=-1.0)), "temperature = -1.0; expected 0 or"),
        (Request("r", (1,), 0, Sampling(1, temperature=1e-40)), "temperature = 1e-40"),
        (Request("r", (1,), 0, Sampling(1, temperature=float("nan"))), "temperature = nan"),
        (Request("first", (1,), 0, Sampling(1)), "unique"),
    ],
)
def test_submit_queues_nothing_when_one_request_is_invalid(request_: Request, message: str) -> None:
    engine = engine_of(build(), max_length=24)
    with pytest.raises(RolloutError, match=message):
        engine.submit([Request("first", (1,), 0, Sampling(1)), request_])
    assert not engine.has_work


def test_step_raises_when_weights_have_diverged() -> None:
    module = build()
    engine = engine_of(module, version=3)
    engine.load(((name, tensor * torch.nan) for name, tensor in module.state_dict().items()), 4)
    with pytest.raises(RolloutError, match="version 4"):
        run(engine, requests(1))


def test_completion_arrays_own_their_memory() -> None:
    done = run(engine_of(build()), requests(3))
    assert all(
        array.base is None for c in done.values() for array in (c.tokens, c.logprobs, c.versions)
    )


def check_calls(
    engine: NativeEngine,
    wanted: list[Request],
    whole: Results,
    actions: list[tuple[str, int]],
    slots: int,
) -> None:
    """Check that each request returns once, with the tokens of `whole`, after these calls."""
    coming = {request.id: request for request in wanted}
    inside: dict[str, Request] = {}
    done: Results = {}

    def take(results: list[tuple[str, Completion]]) -> None:
        for id, completion in results:
            request = inside.pop(id)
            if completion.finish is Finish.INTERRUPT:
                coming[id] = Request(id, request.prompt, request.seed, request.sampling, completion)
            else:
                done[id] = completion

    for kind, number in [*actions, ("submit", len(wanted)), ("step", 10_000)]:
        if kind == "submit":
            chosen = [coming.pop(id) for id in list(coming)[:number]]
            inside |= {request.id: request for request in chosen}
            engine.submit(chosen)
        elif kind == "step":
            while number and engine.has_work:
                take(engine.step())
                number -= 1
        elif kind == "abort":
            take(engine.abort([*list(inside)[number : number + 1], "unknown"]))
        elif kind == "interrupt":
            take(engine.interrupt())
        else:
            getattr(engine, kind)()
        assert engine.running + engine.waiting == len(inside) and engine.running <= slots
    assert set(done) == {request.id for request in wanted} and not inside
    for id, completion in done.items():
        assert completion.tokens.tolist() == whole[id].tokens[: len(completion)].tolist()
        assert completion.finish is Finish.ABORT or len(completion) == len(whole[id])


@cache
def model_and_completions() -> tuple[PreTrainedModel, Results]:
    return (module := build()), run(engine_of(module), requests(12, new=9))


ACTION = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 5)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("interrupt"), st.just(0)),
)


@given(st.lists(ACTION, max_size=25), st.integers(1, 6))
@settings(max_examples=30)
def test_each_request_returns_once_after_any_sequence_of_calls(
    actions: list[tuple[str, int]], slots: int
) -> None:
    module, whole = model_and_completions()
    engine = engine_of(module, slots=slots, max_length=40)
    check_calls(engine, requests(12, new=9), whole, actions, slots)
