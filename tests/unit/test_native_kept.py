"""Kept contexts of the native engine: later turns reuse them, and completions do not change."""

from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.model.weights import DecoderWeights
from paceline.rollout.native.cache import Cache
from paceline.rollout.native.engine import NativeEngine
from paceline.rollout.native.kept import KeptContexts
from paceline.rollout.native.rows import Copy, Place, copy_at_once
from paceline.rollout.native.slots import Sequence
from paceline.types import Completion, Finish, Request, Sampling
from tests.architectures import tiny_architecture
from tests.unit import test_native_engine, test_native_module
from tests.unit.test_native_ahead import ahead_of, pages_held
from tests.unit.test_native_engine import build, check_logprobs, run, same

Engine = Callable[..., NativeEngine]
ENGINES = {
    "rows": test_native_engine.engine_of,
    "module": test_native_module.engine_of,
    "pages": ahead_of,
}
IDS = count()
OPENING = tuple(range(1, 21))
USER = (7, 8, 9, 10)


@pytest.fixture(params=ENGINES)
def engine_of(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]


def turn(context: tuple[int, ...], new: int = 4, **sampling) -> Request:
    number = next(IDS)
    return Request(f"turn {number}", context, number, Sampling(new, **sampling))


def answer(engine: NativeEngine, request: Request) -> Completion:
    return run(engine, [request])[request.id]


def after(
    request: Request, completion: Completion, user: tuple[int, ...] = USER
) -> tuple[int, ...]:
    return (*request.prompt, *completion.tokens.tolist(), *user)


def test_later_turns_prefill_five_times_fewer_tokens_in_ten_turns(engine_of: Engine) -> None:
    module = build()
    engine, context, expected, first = engine_of(module), OPENING, 0, 0
    for number in range(10):
        request = turn(context, temperature=0.0 if number % 2 else 1.0)
        completion, fresh = answer(engine, request), engine_of(module)
        same(completion, answer(fresh, request))
        check_logprobs(module, request, completion)
        first = first or engine.tokens_prefilled
        expected += fresh.tokens_prefilled if number else 0
        context = after(request, completion)
    later = engine.tokens_prefilled - first
    assert (later, expected) == (9 * len(USER), sum(20 + 8 * n - 1 for n in range(1, 10)))
    assert expected >= 5 * later and engine.tokens_reused == expected - later


def test_conversations_keep_their_contexts_apart(engine_of: Engine) -> None:
    module = build()
    engine = engine_of(module, slots=4)
    contexts = [OPENING, OPENING, OPENING, tuple(range(30, 37))]  # three samples of one prompt
    for number in range(4):
        wanted = [turn(context, 3 + 2 * n) for n, context in enumerate(contexts)]
        before = engine.tokens_prefilled
        done = run(engine, wanted)
        for n, request in enumerate(wanted):
            check_logprobs(module, request, done[request.id])
            contexts[n] = after(request, done[request.id], USER[: 1 + n])
        assert engine.tokens_prefilled - before == (1 + 2 + 3 + 4 if number else 19 + 6)


@pytest.mark.parametrize("name", ["bloom", "gemma3_text", "gpt2", "deepseek_v3"])
def test_later_turns_are_right_for_any_positions_and_windows(name: str) -> None:
    module = tiny_architecture(name)
    engine = test_native_module.engine_of(module, slots=2, max_length=90)
    contexts = [tuple(range(3, 15)), tuple(range(5, 12))]
    for _ in range(4):
        wanted = [turn(context, 3 + 4 * n) for n, context in enumerate(contexts)]
        done = run(engine, wanted)
        for request in wanted:
            check_logprobs(module, request, done[request.id])
        contexts = [after(request, done[request.id], (7, 8)) for request in wanted]
    assert engine.tokens_reused > 3 * (12 + 7)


def test_context_is_not_reused_after_weights_change(engine_of: Engine) -> None:
    old, new = build(seed=0), build(seed=1)
    engine = engine_of(old)
    request = turn(OPENING)
    context = after(request, answer(engine, request))
    engine.load(new.state_dict().items(), 1)
    late = turn(context)
    check_logprobs(new, late, answer(engine, late))
    assert engine.tokens_reused == 0


@pytest.mark.parametrize("change", ["wait_idle", "set_version", "sleep"])
def test_context_is_not_reused_after_change_in_place(change: str) -> None:
    module, other = build(seed=0), build(seed=1)
    weights = DecoderWeights.from_module(module, share=True)
    engine = NativeEngine(module.config, weights, slots=4, max_length=128)
    request = turn(OPENING)
    context = after(request, answer(engine, request))
    getattr(engine, change)(*((1,) if change == "set_version" else ()))
    weights.load(other.state_dict().items())  # as a train step does, in the engine's memory
    late = turn(context)
    check_logprobs(other, late, answer(engine, late))
    assert engine.tokens_reused == 0


def test_context_is_not_kept_when_weights_changed_during_it(engine_of: Engine) -> None:
    old, new = build(seed=0), build(seed=1)
    engine, request = engine_of(old), turn(OPENING, 20)
    done = run(engine, [request], steps=3)
    engine.load(new.state_dict().items(), 1)
    done |= run(engine)
    late = turn(after(request, done[request.id]))
    check_logprobs(new, late, answer(engine, late))
    assert engine.tokens_reused == 0


def test_stale_context_is_detected(engine_of: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "drop_kept", lambda self: None)
    old, new = build(seed=0), build(seed=1)
    engine, request = engine_of(old), turn(OPENING)
    context = after(request, answer(engine, request))
    engine.load(new.state_dict().items(), 1)
    engine.submit([late := turn(context)])
    with pytest.raises(AssertionError, match="drops kept contexts"):
        engine.step()
    for kept in engine._cache.kept.oldest(1):
        kept.epoch = engine._epoch
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_logprobs(new, late, run(engine)[late.id])


def test_least_recently_used_context_is_dropped_first() -> None:
    module = build()
    engine = test_native_engine.engine_of(module, slots=3)
    first = [turn((n, *OPENING)) for n in range(3)]
    done = [answer(engine, request) for request in first]
    second = turn(after(first[0], done[0]))  # now the context of `first[1]` is the oldest
    again = answer(engine, second)
    answer(engine, turn(OPENING[::-1]))
    for request, completion, reused in (
        (second, again, len(second.prompt) + len(again) - 1),
        (first[2], done[2], len(OPENING) + len(done[2])),
        (first[1], done[1], 0),
    ):
        before = engine.tokens_reused
        check_logprobs(module, late := turn(after(request, completion)), answer(engine, late))
        assert engine.tokens_reused - before == reused


def test_kept_contexts_do_not_delay_other_sequences(engine_of: Engine) -> None:
    options = {"pages": 20} if engine_of is ahead_of else {}
    engine = engine_of(build(), slots=4, **options)
    run(engine, [turn((n, *OPENING), 12) for n in range(4)])
    assert len(engine._cache.kept) == 4 and engine.kv_used == 0
    memory = engine.cache_bytes()
    engine.submit([turn((9, n, *OPENING), 12) for n in range(4)])
    engine.step()
    assert engine.running == 4 and engine.waiting == 0
    while engine.has_work:
        engine.step()
    assert engine.cache_bytes() == memory
    if engine_of is ahead_of:
        assert pages_held(engine) == 0


def test_pages_of_kept_contexts_are_freed_before_sequences_are_preempted() -> None:
    engine = ahead_of(build(), slots=2, pages=16)
    run(engine, [turn((n, *OPENING), 20) for n in range(2)])  # 6 pages each
    answer(engine, turn((5,), 90))
    assert engine.tokens_prefilled == 2 * len(OPENING)


def test_resumed_completion_needs_no_prefill_when_weights_did_not_change(engine_of: Engine) -> None:
    module = build()
    wanted = [turn((n, *OPENING), 20) for n in range(3)]
    whole, engine = run(engine_of(module), wanted), engine_of(module)
    run(engine, wanted, steps=3)
    stopped, before = dict(engine.interrupt()), engine.tokens_prefilled
    assert all(len(stopped[request.id]) for request in wanted)
    done = run(engine, [Request(r.id, r.prompt, r.seed, r.sampling, stopped[r.id]) for r in wanted])
    assert engine.tokens_prefilled == before
    for id, completion in whole.items():
        same(done[id], completion)


def test_prompt_is_reused_when_template_rewrites_last_message(engine_of: Engine) -> None:
    module = build()
    engine, request = engine_of(module), turn(OPENING, 12)
    answer(engine, request)
    rewritten = turn((*OPENING, 40, 41, *USER))
    check_logprobs(module, rewritten, answer(engine, rewritten))
    assert engine.tokens_reused == len(OPENING)


def test_second_continuation_of_context_is_prefilled(engine_of: Engine) -> None:
    module = build()
    engine, request = engine_of(module), turn(OPENING)
    completion = answer(engine, request)
    branches = [turn(after(request, completion, (n,))) for n in (5, 6)]
    done = run(engine, branches)
    for branch in branches:
        check_logprobs(module, branch, done[branch.id])
    assert engine.tokens_reused == len(OPENING) + len(completion) - 1


def test_aborted_sequence_is_not_kept(engine_of: Engine) -> None:
    engine, request = engine_of(build()), turn(OPENING, 50)
    run(engine, [request], steps=3)
    engine.abort([request.id])
    assert len(engine._cache.kept) == 0


def test_context_is_compared_token_for_token_when_hashes_are_equal() -> None:
    kept = KeptContexts(16)
    kept._powers[:] = 0  # all hashes are equal
    sequence = Sequence.of(turn((1, 2, 3)))
    kept.add(sequence, np.array([4, 5], np.int32))
    assert kept.find(Sequence.of(turn((1, 2, 9, 4, 5)))) is None
    assert kept.find(Sequence.of(turn((1, 2, 3, 4, 5, 6)))) == (sequence, 4)


@given(st.permutations(range(7)), st.lists(st.booleans(), min_size=7, max_size=7))
def test_copies_of_rows_act_as_if_done_at_once(targets: list[int], chosen: list[bool]) -> None:
    cache = torch.arange(7.0)
    copies = [
        Copy(Place(source, 0, 1), target, 0)
        for source, target in enumerate(targets)
        if chosen[source]
    ]
    expected = cache.clone()
    for copy in copies:
        expected[copy.row] = cache[copy.source.row]

    def write(data: list[torch.Tensor], copy: Copy) -> None:
        cache[copy.row] = data[0]

    copy_at_once(copies, lambda place: [cache[place.row]], write)
    assert cache.tolist() == expected.tolist()


MODELS = [build(seed=seed) for seed in range(3)]
ACTION = st.tuples(
    st.sampled_from(["submit"] * 8 + ["step"] * 8 + ["abort", "interrupt", "swap", "sleep"]),
    st.integers(0, 5),
)


@pytest.mark.parametrize("name", ENGINES)
@given(st.lists(ACTION, min_size=10, max_size=60), st.integers(1, 5), st.integers(16, 40))
@settings(max_examples=8)
def test_turns_equal_plain_forward_pass_after_any_sequence_of_calls(
    name: str, actions: list[tuple[str, int]], slots: int, pages: int
) -> None:
    """Conversations of six agents, of which two share a prompt, with changing weights."""
    options = {"pages": pages} if name == "pages" else {}
    engine = ENGINES[name](MODELS[0], slots=slots, **options)
    contexts = [OPENING[n // 2 :] for n in range(6)]
    inside: dict[str, tuple[int, Request, int]] = {}
    resumable: dict[int, Request] = {}

    def take(results: list[tuple[str, Completion]]) -> None:
        for id, completion in results:
            agent, request, version = inside.pop(id)
            if completion.finish is Finish.INTERRUPT:
                resumable[agent] = Request(
                    id, request.prompt, request.seed, request.sampling, completion
                )
                continue
            if {version, engine.version, *completion.versions.tolist()} == {version}:
                check_logprobs(MODELS[version % 3], request, completion)
            grown = after(request, completion, (3 + agent, 5))
            contexts[agent] = grown if len(grown) < 100 else OPENING

    for kind, number in [*actions, ("step", 10_000)]:
        if kind == "submit" and number not in (agent for agent, _, _ in inside.values()):
            request = resumable.pop(number, None) or turn(contexts[number], 3 + 5 * number)
            inside[request.id] = number, request, engine.version
            engine.submit([request])
        elif kind == "step":
            for _ in range(3 * number):
                take(engine.step() if engine.has_work else [])
        elif kind == "abort":
            take(engine.abort([id for id, (agent, _, _) in inside.items() if agent == number]))
        elif kind == "interrupt":
            take(engine.interrupt())
        elif kind == "swap":
            version = engine.version + 1
            engine.load(MODELS[version % 3].state_dict().items(), version)
        elif kind == "sleep":
            engine.sleep()
        assert engine.running + engine.waiting == len(inside) and engine.running <= slots
    assert not inside
    if name == "pages":
        assert pages_held(engine) == 0
    else:
        engine.wait_idle()
        assert engine._backend._rows.held == 0  # type: ignore[attr-defined]
