"""The native engine on a GPU against its CPU completions and the log-probs of transformers."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from paceline.errors import RolloutError
from paceline.model.weights import DecoderWeights
from paceline.rollout.native.engine import NativeEngine
from paceline.types import Completion, Finish, Request, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

VOCABULARY, LENGTH = 1000, 512
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}
MODELS: dict[str, tuple[type[PreTrainedModel], PretrainedConfig]] = {
    "llama, head dim 64, biases": (
        LlamaForCausalLM,
        LlamaConfig(
            **SHAPE,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "qwen2, 7 heads to a kv head, tied": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **{**SHAPE, "hidden_size": 14 * 64, "initializer_range": 0.03},
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3, head dim 128": (
        Qwen3ForCausalLM,
        Qwen3Config(**SHAPE, num_attention_heads=4, num_key_value_heads=1, head_dim=128),
    ),
    "llama, head dim 32": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=4),
    ),
}


def build(name: str = "qwen3, head dim 128", seed: int = 0) -> PreTrainedModel:
    kind, config = MODELS[name]
    torch.manual_seed(seed)
    module = kind(config).eval()
    # Biases and norms start at 0 and 1, which would hide bugs.
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    return module


def engine_of(
    module: PreTrainedModel, device: str = "cuda", slots: int = 16, **options
) -> NativeEngine:
    weights = DecoderWeights.from_module(module.to(device), share=False)
    return NativeEngine(module.config, weights, slots=slots, max_length=LENGTH, **options)


def run(engine: NativeEngine, wanted: list[Request], steps: int = 100_000) -> dict[str, Completion]:
    engine.submit(wanted)
    done: dict[str, Completion] = {}
    while engine.has_work and steps:
        done |= dict(engine.step())
        steps -= 1
    return done


def mixed() -> list[Request]:
    """Return requests with all sampling settings and with long, short and equal prompts."""
    random = np.random.default_rng(0)
    settings = [
        {},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"top_k": 20, "top_p": 0.9, "temperature": 1.3},
        {"stop_token_ids": tuple(range(0, VOCABULARY, 20))},
    ]
    wanted = []
    for i in range(42):
        length = int(random.choice([1, 2, 30, 63, 64, 65, 130, 300]))
        prompt = tuple(random.integers(0, VOCABULARY, length).tolist())
        for j in range(1 + i % 3):
            sampling = Sampling(int(random.integers(1, 90)), **settings[i % 7])
            wanted.append(Request(f"r{i}-{j}", prompt, 10 * i + j, sampling))
    return wanted


@torch.no_grad()
def logprob_error(module: PreTrainedModel, request: Request, completion: Completion) -> np.ndarray:
    """Return the distance of the log-probs to a float32 forward pass over all tokens."""
    tokens = torch.tensor([[*request.prompt, *completion.tokens.tolist()]], device="cuda")
    logits = module(tokens).logits[0, len(request.prompt) - 1 : -1].float() / (
        request.sampling.temperature or 1.0
    )
    expected = logits.log_softmax(-1).gather(1, tokens[0, len(request.prompt) :, None])[:, 0]
    return np.abs(completion.logprobs - expected.cpu().numpy())


def untruncated(request: Request) -> bool:
    return request.sampling.top_k == 0 and request.sampling.top_p == 1.0


def logprob_errors(
    module: PreTrainedModel, wanted: list[Request], done: dict[str, Completion]
) -> np.ndarray:
    """Return the distance of all log-probs to those of the model in float32."""
    exact, plain = module.cuda().float(), filter(untruncated, wanted)
    return np.concatenate([logprob_error(exact, request, done[request.id]) for request in plain])


@pytest.mark.parametrize("name", MODELS)
def test_completions_equal_cpu_and_logprobs_equal_transformers(name: str) -> None:
    expected = run(engine_of(build(name), "cpu"), mixed())
    module = build(name)
    engine = engine_of(module)
    done = run(engine, mixed())
    assert set(done) == set(expected)
    for request in mixed():
        a, b = done[request.id], expected[request.id]
        assert a.tokens.tolist() == b.tokens.tolist() and a.finish == b.finish, request.id
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
        if untruncated(request):
            assert logprob_error(module, request, a).max() < 1e-4


def test_bfloat16_logprobs_are_close_to_float32() -> None:
    module = build("qwen2, 7 heads to a kv head, tied", seed=2).cuda().bfloat16()
    done = run(engine_of(module), mixed())
    errors = logprob_errors(module, mixed(), done)
    assert errors.mean() < 0.02 and errors.max() < 0.2


def test_logprobs_are_right_when_attention_splits_long_sequences() -> None:
    module = build()
    random = np.random.default_rng(1)
    wanted = [
        Request(
            f"r{i}", tuple(random.integers(0, VOCABULARY, 100 + 150 * i).tolist()), i, Sampling(60)
        )
        for i in range(3)
    ]
    done = run(engine_of(module, slots=3), wanted)
    assert max(logprob_error(module, request, done[request.id]).max() for request in wanted) < 1e-4


def test_samples_of_one_prompt_share_one_prefill() -> None:
    module = build()
    prompt = tuple(range(150))
    wanted = [Request(f"g{i}", prompt, i, Sampling(40)) for i in range(20)]
    engine = engine_of(module)
    done = run(engine, wanted)
    assert engine.tokens_prefilled <= 2 * 149
    assert max(logprob_error(module, request, done[request.id]).max() for request in wanted) < 1e-4


def converse(
    engine: NativeEngine, turns: int, agents: int = 8
) -> list[tuple[Request, Completion, int]]:
    """Return the turns of conversations and the tokens that the engine prefilled for each round."""
    random, found = np.random.default_rng(0), []
    contexts = [tuple(range(n, n + 30 + 23 * (n // 2))) for n in range(agents)]
    contexts[1] = contexts[0]  # two samples of one prompt share its pages
    for number in range(turns):
        wanted = [
            Request(f"{number}-{n}", context, 10 * number + n, Sampling(5 + 3 * n))
            for n, context in enumerate(contexts)
        ]
        before = engine.tokens_prefilled
        done = run(engine, wanted)
        prefilled = engine.tokens_prefilled - before
        for n, request in enumerate(wanted):
            completion = done[request.id]
            user = random.integers(0, VOCABULARY, 3 + n).tolist()
            contexts[n] = (*request.prompt, *completion.tokens.tolist(), *user)
            found.append((request, completion, prefilled))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_later_turns_prefill_only_new_tokens(name: str) -> None:
    expected = converse(engine_of(build(name), "cpu"), 6)
    module = build(name)
    engine = engine_of(module)
    for number, (request, completion, prefilled) in enumerate(converse(engine, 6)):
        assert completion.tokens.tolist() == expected[number][1].tokens.tolist(), request.id
        assert logprob_error(module, request, completion).max() < 1e-4
        assert number < 8 or prefilled == sum(3 + n for n in range(8))
    assert engine.tokens_reused > 5 * engine.tokens_prefilled


def test_later_turns_are_right_when_kept_pages_are_needed() -> None:
    module = build()
    expected = converse(engine_of(module, slots=4), 6)
    fraction = 14.5 * 3 * 2 * 64 * 128 * 4 / torch.cuda.mem_get_info()[0]
    engine = engine_of(module, slots=4, kv_memory_fraction=fraction)
    pages = engine._backend.pages  # type: ignore[attr-defined]
    before = pages.free
    assert 8 <= before < 40
    for (_, a, _), (_, b, _) in zip(converse(engine, 6), expected, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
    engine.wait_idle()
    assert pages.free == before


def test_later_turn_does_not_reuse_context_of_old_weights() -> None:
    old, new = build(seed=0), build(seed=1)
    engine = engine_of(old)
    request = Request("first", tuple(range(150)), 0, Sampling(40))
    completion = run(engine, [request])["first"]
    engine.load(new.cuda().state_dict().items(), 1)
    late = Request("late", (*request.prompt, *completion.tokens.tolist(), 5), 1, Sampling(40))
    assert logprob_error(new, late, run(engine, [late])["late"]).max() < 1e-4
    assert engine.tokens_reused == 0


def test_existing_graphs_use_new_weights_and_report_their_version() -> None:
    old, new = build(seed=0), build(seed=1)
    engine = engine_of(old, version=4)
    wanted = Request("r", (1, 2, 3), 0, Sampling(100))
    run(engine, [wanted], steps=3)
    graphs = dict(engine._backend._graphs)  # type: ignore[attr-defined]
    engine.load(new.cuda().state_dict().items(), 5)
    completion = run(engine, [])["r"]
    assert engine._backend._graphs == graphs  # type: ignore[attr-defined]
    change = int((completion.versions == 4).sum())
    assert change == 24 and completion.versions.tolist() == [4] * change + [5] * (100 - change)
    first = dataclasses.replace(
        completion, tokens=completion.tokens[:change], logprobs=completion.logprobs[:change]
    )
    assert logprob_error(old, wanted, first).max() < 1e-4
    late = Request("late", (1, 2, 3), 0, Sampling(20))
    assert logprob_error(new, late, run(engine, [late])["late"]).max() < 1e-4


def test_completions_stay_the_same_when_memory_is_scarce() -> None:
    module = build()
    expected = run(engine_of(module), mixed())
    page = 3 * 2 * 64 * 128 * 4
    fraction = 12.5 * page / torch.cuda.mem_get_info()[0]
    engine = engine_of(module, kv_memory_fraction=fraction)
    pages = engine._backend.pages  # type: ignore[attr-defined]
    assert 8 <= pages.free < 40
    before, done = pages.free, run(engine, mixed())
    engine.wait_idle()  # drops kept contexts
    assert pages.free == before
    for id, completion in expected.items():
        assert done[id].tokens.tolist() == completion.tokens.tolist()
        assert done[id].finish == completion.finish


def test_engine_rejects_memory_for_less_than_one_sequence() -> None:
    with pytest.raises(RolloutError, match="kv_memory_fraction"):
        engine_of(build(), kv_memory_fraction=1e-9)


def test_sequences_continue_after_sleep_frees_memory() -> None:
    module = build()
    expected = run(engine_of(module), mixed())
    engine = engine_of(module, slots=64)
    done = run(engine, mixed(), steps=3)
    awake = torch.cuda.memory_allocated()
    engine.sleep()
    assert awake - torch.cuda.memory_allocated() > 64 * 512 * 3 * 2 * 128 * 4 * 0.9
    done |= run(engine, [])
    for id, completion in expected.items():
        assert done[id].tokens.tolist() == completion.tokens.tolist()


def test_resumed_completion_equals_uninterrupted_one() -> None:
    module = build()
    expected, engine = run(engine_of(module), mixed()), engine_of(module)
    done = run(engine, mixed(), steps=4)
    stopped = dict(engine.interrupt())
    finished = {
        id for id, completion in stopped.items() if completion.finish is not Finish.INTERRUPT
    }
    done |= {id: stopped[id] for id in finished}
    done |= run(
        engine,
        [
            dataclasses.replace(r, partial=stopped[r.id])
            for r in mixed()
            if r.id in stopped and r.id not in finished
        ],
    )
    for id, completion in expected.items():
        assert done[id].tokens.tolist() == completion.tokens.tolist()
        assert done[id].finish == completion.finish


def test_engine_recovers_after_diverged_weights_are_replaced() -> None:
    module = build()
    engine = engine_of(module)
    engine.load(((name, tensor * torch.nan) for name, tensor in module.state_dict().items()), 1)
    with pytest.raises(RolloutError, match="version 1"):
        run(engine, [Request("r", (1, 2, 3), 0, Sampling(20))])
    engine.abort(["r"])
    engine.load(module.state_dict().items(), 2)
    late = Request("late", (1, 2, 3, 4), 0, Sampling(20))
    assert logprob_error(module, late, run(engine, [late])["late"]).max() < 1e-4


def test_memory_does_not_grow_over_2000_admissions() -> None:
    engine = engine_of(build(), slots=64)
    random = np.random.default_rng(0)

    def work(n: int, name: str) -> None:
        lengths = random.integers(1, 30, (n, 2)).tolist()
        run(
            engine,
            [
                Request(f"{name}{i}", tuple(range(a)), i, Sampling(b))
                for i, (a, b) in enumerate(lengths)
            ],
        )

    for n in (1, 2, 4, 8, 16, 32, 48, 64):  # capture all graphs now
        run(engine, [Request(f"{n}-{i}", (1, 2), i, Sampling(9)) for i in range(n)])
    work(200, "warm")
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    work(2000, "r")
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_full_engine_admits_new_sequences_when_each_has_one_page() -> None:
    module = build()
    weights = DecoderWeights.from_module(module.to("cuda"), share=False)
    engine = NativeEngine(module.config, weights, slots=16, max_length=40)  # one page each
    for wave in range(3):
        wanted = [
            Request(f"{wave}.{number}", (1, 2, number), number, Sampling(8)) for number in range(16)
        ]
        assert len(run(engine, wanted, steps=1000)) == 16
