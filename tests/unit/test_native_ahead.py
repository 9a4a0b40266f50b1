"""The native engine on a backend that runs ahead of the host, keeps device state and has few pages.

The backend is on the CPU but behaves like the one for GPUs: bursts of steps are read one burst
late, prompts are prefilled in chunks, and pages run out. The completions must not change.
"""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from paceline.model.weights import DecoderWeights
from paceline.rollout.native.backend import CompletedBurst, PrefillChunk, SimpleBackend
from paceline.rollout.native.engine import NativeEngine
from paceline.rollout.native.pages import Pages
from paceline.rollout.native.slots import Sequence, Slots
from paceline.types import Request, Sampling
from tests.unit.test_native_engine import (
    Results,
    build,
    check_calls,
    check_logprobs,
    engine_of,
    requests,
    run,
    same,
)

LENGTH = 128
PAGE = 8


class AheadBackend(SimpleBackend):
    """Backend that keeps the KV cache in pages and advances the state of each row by itself.

    The rows of `SimpleBackend` are scratch memory: the pages are copied there and back.
    """

    ahead = 1
    prefill_tokens = 16
    admit_divisor = 4
    kept_in_slots = False

    def __init__(
        self, module: PreTrainedModel, weights: DecoderWeights, slots: int, burst: int, pages: int
    ) -> None:
        super().__init__(module.config, weights, slots, LENGTH)
        self.burst, self.pages = burst, Pages(pages + 1, PAGE)
        self.device = Slots(slots, LENGTH)
        layers, _, heads, two, _, dim = self._model.cache_shape
        self.store = torch.zeros(layers, pages + 1, heads, two, PAGE, dim)

    def kv_used(self, kept: list[Sequence]) -> float:  # type: ignore[override]
        return self.pages.used([sequence.pages for sequence in kept])

    def steps(self, rows: int, brief: bool) -> int:
        return 1 if brief else self.burst

    def reserve(self, sequence: Sequence, source: Sequence | None) -> bool:
        shared = source.pages[: (len(sequence.context) - 1) // PAGE] if source else []
        if not self.take_pages(sequence, shared):
            return False
        self.pages.share(shared)
        return True

    def reuse(self, sequence: Sequence, kept: Sequence, length: int) -> bool:
        pages = self.pages.needed(length)
        if not self.take_pages(sequence, kept.pages[:pages]):
            return False
        self.pages.give_back(kept.pages[pages:])
        kept.pages = []
        return True

    def take_pages(self, sequence: Sequence, pages: list[int]) -> bool:
        taken = self.pages.take(self.pages.needed(len(sequence.context)) - len(pages))
        sequence.pages = pages + (taken or [])
        return taken is not None

    def grow(self, slots: Slots, positions: NDArray[np.int64]) -> bool:
        for running, position in zip(slots.live, positions.tolist(), strict=True):
            taken = self.pages.take(max(0, self.pages.needed(position) - len(running.pages)))
            if taken is None:
                return False
            running.pages += taken
        return True

    def keep(self, sequence: Sequence, row: int, length: int) -> None:
        pages = self.pages.needed(length)
        self.pages.give_back(sequence.pages[pages:])
        del sequence.pages[pages:]

    def free(self, sequence: Sequence) -> None:
        self.pages.give_back(sequence.pages)
        sequence.pages = []

    def settle(self, sequences: list[Sequence], row: int) -> None: ...

    def prefill(self, chunks: list[PrefillChunk], row: int) -> None:
        for chunk in chunks:
            self.read_pages(chunk.sequence, 0)
            super().prefill([chunk], 0)
            self.write_pages(chunk.sequence, 0, chunk.start, chunk.stop)

    def fork(self, source: Sequence, row: int, copies: list[Sequence], target: int) -> None:
        last, part = divmod(len(copies[0].context) - 1, PAGE)
        for copy in copies if part else ():
            self.store[:, copy.pages[last]] = self.store[:, source.pages[last]]

    def place(self, slots: Slots, row: int) -> None:
        for running in slots.live[row:]:
            self.device.add(running)

    def move(self, slots: Slots, moves: list[tuple[int, int]]) -> None:
        gone = [row for row, running in enumerate(self.device.live) if running not in slots.live]
        assert self.device.remove(gone) == moves

    def decode(self, slots: Slots, steps: int) -> CompletedBurst:
        device, n = self.device, len(slots.live)
        assert device.live == slots.live
        tokens, logprobs = np.zeros((steps, n), np.int32), np.zeros((steps, n), np.float32)
        for row, running in enumerate(device.live):
            self.read_pages(running, row)
        before = device.position[:n].copy()
        for step in range(steps):
            sampled = super().decode(device, 1)
            going = np.flatnonzero(device.position[:n] < device.limit[:n])
            tokens[step], logprobs[step] = sampled.tokens[0], sampled.logprobs[0]
            device.record(going, tokens[step, going], logprobs[step, going], 0)
        for row, running in enumerate(device.live):
            self.write_pages(running, row, int(before[row]), int(device.position[row]))
        return CompletedBurst(tokens, logprobs)

    @torch.inference_mode()
    def read_pages(self, sequence: Sequence, row: int) -> None:
        found = self.store[:, sequence.pages].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
        self._model.kv[:, row, :, :, : len(sequence.pages) * PAGE] = found

    @torch.inference_mode()
    def write_pages(self, sequence: Sequence, row: int, start: int, stop: int) -> None:
        for position in range(start, stop):
            page, offset = divmod(position, PAGE)
            value = self._model.kv[:, row, :, :, position]
            self.store[:, sequence.pages[page], :, :, offset] = value


def ahead_of(
    module: PreTrainedModel, slots: int = 4, burst: int = 3, pages: int = 1000, **options
) -> NativeEngine:
    weights = DecoderWeights.from_module(module, share=False)
    backend = AheadBackend(module, weights, slots, burst, pages)
    return NativeEngine(
        module.config, weights, slots=slots, max_length=LENGTH, backend=backend, **options
    )


def pages_held(engine: NativeEngine) -> int:
    """Return the pages that sequences hold after the kept contexts were dropped."""
    engine.wait_idle()
    pages = engine._backend.pages  # type: ignore[attr-defined]
    return len(pages._holders) - 1 - pages.free


def mixed() -> list[Request]:
    """Return long and short requests, with and without stop tokens, some with the same prompt."""
    stopped = requests(10, new=40, stop_token_ids=(3, 17, 40))
    group = [
        Request(f"g{i}", tuple(range(1, 30)), i, Sampling(5 + 7 * i, top_k=10)) for i in range(5)
    ]
    long = [
        Request(f"l{i}", tuple(range(60)), i, Sampling(1 + 20 * i, temperature=0.7))
        for i in range(4)
    ]
    return [*stopped, *group, *long, Request("one", (5,), 1, Sampling(1))]


@cache
def model_and_completions() -> tuple[PreTrainedModel, Results]:
    return (module := build()), run(engine_of(module), mixed())


@pytest.mark.parametrize("burst", [1, 3, 8])
@pytest.mark.parametrize("slots", [1, 4, 30])
def test_completions_equal_synchronous_engine_when_backend_runs_ahead(
    burst: int, slots: int
) -> None:
    module, expected = model_and_completions()
    engine = ahead_of(module, slots, burst)
    done = run(engine, mixed())
    assert set(done) == set(expected)
    for id, completion in done.items():
        same(completion, expected[id])
    assert engine.tokens_sampled == sum(map(len, done.values())) and pages_held(engine) == 0


@pytest.mark.parametrize("pages", [16, 20, 40])
def test_completions_do_not_change_when_pages_run_out(pages: int) -> None:
    module, expected = model_and_completions()
    engine = ahead_of(module, slots=8, pages=pages)
    done = run(engine, mixed())
    assert set(done) == set(expected) and pages_held(engine) == 0
    for id, completion in done.items():
        same(completion, expected[id])


def test_engine_preempts_sequences_when_they_outgrow_memory() -> None:
    engine = ahead_of(build(), slots=4, pages=17)
    wanted = [Request(f"r{i}", (1, 2, 3), i, Sampling(100)) for i in range(4)]
    done = run(engine, wanted)
    assert {len(completion) for completion in done.values()} == {100}
    assert engine.tokens_prefilled > 20  # partial completions were prefilled again


def test_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    engine = ahead_of(build(), slots=2)
    run(engine, [Request("first", (1, 2), 0, Sampling(60))], steps=1)
    engine.submit([Request("long", tuple(range(60)), 1, Sampling(5))])
    while engine.tokens_prefilled < 60:
        before = engine.tokens_prefilled
        engine.step()
        assert engine.tokens_prefilled - before <= AheadBackend.prefill_tokens
        assert engine.running == 2
    check_logprobs(build(), Request("long", tuple(range(60)), 1, Sampling(5)), run(engine)["long"])


def test_tokens_in_flight_keep_old_version_when_weights_change() -> None:
    old, new = build(seed=0), build(seed=1)
    engine = ahead_of(old, version=4)
    wanted = Request("r", (4, 5, 6), 1, Sampling(40))
    run(engine, [wanted], steps=4)  # 4 bursts of 3 started
    engine.load(new.state_dict().items(), 5)
    completion = run(engine)["r"]
    assert completion.versions.tolist() == [4] * 12 + [5] * 28
    tokens = torch.tensor([[*wanted.prompt, *completion.tokens.tolist()]])
    with torch.no_grad():
        cache = DynamicCache(config=old.config)
        before = old(tokens[:, :14], past_key_values=cache).logits[0, 2:]
        after = new(tokens[:, 14:-1], past_key_values=cache).logits[0]
    expected = torch.cat((before, after)).log_softmax(-1).gather(1, tokens[0, 3:, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=1e-4)


def test_bursts_are_brief_only_until_expected_weights_arrive() -> None:
    engine = ahead_of(build(), slots=1, burst=8)
    engine.submit([Request("r", (1, 2, 3), 0, Sampling(100))])

    def tokens() -> int:
        """Return the tokens that a step starts; its burst is read by a later step."""
        before = engine._slots.ahead[0]
        engine._start([])
        started = int(engine._slots.ahead[0] - before)
        engine.wait_idle()
        return started

    engine.step()
    engine.wait_idle()
    assert tokens() == 8
    engine.expect_sync()
    assert [tokens(), tokens()] == [1, 1]
    engine.set_version(1)
    assert tokens() == 8


def test_wait_idle_reads_all_bursts_in_flight_without_losing_tokens() -> None:
    module = build()
    engine, wanted = ahead_of(module), requests(6)
    done = run(engine, wanted, steps=2)
    engine.wait_idle()
    assert engine.tokens_sampled == 4 * 3 * 2  # two bursts, both read
    done |= run(engine)
    for id, completion in run(engine_of(module), wanted).items():
        same(done[id], completion)


def test_sequences_continue_after_sleep_frees_memory() -> None:
    module, whole = model_and_completions()
    for engine in (ahead_of(module), engine_of(module, slots=4)):
        done = run(engine, mixed(), steps=4)
        engine.sleep()
        assert engine.running == 0 and engine.waiting > 0
        if isinstance(engine._backend, AheadBackend):
            assert pages_held(engine) == 0
        done |= run(engine)
        for id, completion in whole.items():
            same(done[id], completion)


ACTION = st.tuples(
    st.sampled_from(["submit", "step", "abort", "interrupt", "sleep", "wait_idle"]),
    st.integers(0, 6),
)


@given(st.lists(ACTION, max_size=25), st.integers(1, 6), st.integers(1, 4), st.integers(16, 60))
@settings(max_examples=15)
def test_each_request_returns_once_after_any_sequence_of_calls(
    actions: list[tuple[str, int]], slots: int, burst: int, pages: int
) -> None:
    module, whole = model_and_completions()
    engine, wanted = ahead_of(module, slots, burst, pages), mixed()[::2]
    check_calls(engine, wanted, whole, actions, slots)
    assert pages_held(engine) == 0
