"""The contract of rollout engines, tested against each implementation in `ENGINES`."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.config import load_config
from paceline.data.tiny import make_tokenizer
from paceline.errors import RolloutError, SyncError
from paceline.remote.process import ProcessWorker, process_group
from paceline.remote.thread import ThreadWorker
from paceline.remote.worker import Worker
from paceline.rollout.client import EngineClient
from paceline.rollout.engine import RolloutEngine
from paceline.sync.block import WeightBlock, block_size, layout_of
from paceline.sync.shared_memory import BlockTarget
from paceline.sync.transport import TARGET
from paceline.sync.weights import Weights
from paceline.training.lora import LoraDevice
from paceline.training.settings import LoraSettings, TrainSettings
from paceline.types import Completion, Finish, OnSync, Request, Role, Sampling
from paceline.workers.build import build_parts, first_rank_only
from tests.fault_report import Fault
from tests.models import random_model, random_other_model
from tests.processes import children

PROMPT = (5, 9, 13, 2, 7)
# In the environment with vLLM (make test-vllm) only vLLM is tested.
ENGINES = (
    ["vllm in a process", "vllm on two ranks", "vllm in two stages"]
    if find_spec("vllm")
    else ["native on a thread", "native in a process", "native through a module"]
)


class Rig:
    """An engine, a reference model with the same weights, and a way to change both."""

    def __init__(self, engine: RolloutEngine, block: WeightBlock, model: PreTrainedModel) -> None:
        self.engine, self.block, self.model = engine, block, model
        self.version = 0
        self._initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    async def reset(self) -> None:
        self.model.load_state_dict(self._initial)
        await self.engine.resume()
        await self.engine.load_weights(self.publish())

    def change_weights(self) -> Weights:
        """Change the reference model and return its weights for the engine."""
        torch.manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return self.publish()

    def publish(self, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> Weights:
        self.version += 1
        return Weights(self.version, self.block.write(weights or self.model.state_dict().items()))


@asynccontextmanager
async def rig(kind: str, directory: str, tmp_path: Path) -> AsyncIterator[Rig]:
    settings = [
        f"model={directory}",
        "rollout.slots=8",
        "data.max_prompt_length=64",
        "rollout.max_response_length=136",
        "data.task=copy:3",
    ]
    settings += [f"rollout.engine={kind.split()[0]}", "rollout.vllm.eager=true"]
    split = {"vllm on two ranks": "tensor", "vllm in two stages": "pipeline"}.get(kind)
    if split:
        settings += [f"rollout.{split}_parallel=2", "placement.rollout=rollout"]
    args = ((Role.ROLLOUT,), load_config(None, settings), directory, 1)
    worker: Worker
    if split:
        worker = process_group(
            "rollout",
            build_parts,
            args,
            ranks=2,
            threads=1,
            log_folder=tmp_path,
            first_only=first_rank_only([Role.ROLLOUT]),
        )
    elif kind in ("native on a thread", "native through a module"):
        worker = ThreadWorker("rollout", build_parts, args)
    else:
        worker = ProcessWorker(
            "rollout", build_parts, args, cores=[], threads=1, log_path=tmp_path / "rollout.log"
        )
    await worker.ready()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    layout = layout_of(model.state_dict().items())
    path = tmp_path / "weights"
    path.write_bytes(bytes(block_size(layout)))
    await worker.call(TARGET, "open", BlockTarget, str(path), layout)
    engine = EngineClient(worker)
    try:
        yield Rig(engine, WeightBlock(str(path), layout), model)
    finally:
        await engine.close()


Scenario = Callable[[Rig], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module", params=ENGINES)
def with_rig(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Scenario], None]]:
    path = tmp_path_factory.mktemp("model")
    hidden = 128 if "vllm" in request.param else 32  # vLLM needs heads of 32
    directory = (
        random_other_model(path) if "module" in request.param else random_model(path, hidden=hidden)
    )
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        it = runner.run(
            stack.enter_async_context(rig(request.param, directory, tmp_path_factory.mktemp("rig")))
        )

        async def limited(scenario: Scenario) -> None:
            async with asyncio.timeout(120):
                await it.reset()
                await scenario(it)

        yield lambda scenario: runner.run(limited(scenario))
        runner.run(stack.aclose())
    assert not children(), "child processes remain"


def request_of(
    number: int = 0, *, tokens: int = 24, partial: Completion | None = None, **sampling: Any
) -> Request:
    return Request(
        f"r{number}-{tokens}-{partial is not None}",
        PROMPT,
        100 + number,
        Sampling(tokens, **sampling),
        partial,
    )


@torch.no_grad()
def reference(
    model: PreTrainedModel,
    completion: Completion,
    temperature: float = 1.0,
    prompt: tuple[int, ...] = PROMPT,
) -> np.ndarray:
    """Return the log-probs of a plain forward pass over prompt and completion."""
    ids = torch.tensor([[*prompt, *completion.tokens.tolist()]])
    logprobs = torch.log_softmax(model(ids).logits[0].float() / temperature, -1)
    rows = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return logprobs[rows, ids[0, len(prompt) :]].numpy()


@pytest.mark.fault("E6", "12 prompts decoded together beside a plain forward pass of each")
def test_logprobs_equal_plain_forward_pass_at_sampling_temperature(
    with_rig: Any, fault: Fault
) -> None:
    async def scenario(it: Rig) -> None:
        for temperature in (1.0, 0.7):
            for completion in await asyncio.gather(
                *(it.engine.generate(request_of(n, temperature=temperature)) for n in range(12))
            ):
                assert len(completion) == 24 and completion.finish is Finish.LENGTH
                expected = reference(it.model, completion, temperature)
                assert np.abs(completion.logprobs - expected).max() < 1e-4

    with_rig(scenario)
    fault.fired()


@pytest.mark.skipif("native" in ENGINES[0], reason="only vLLM takes given tokens")
def test_forced_tokens_get_logprobs_of_plain_forward_pass(with_rig: Any) -> None:
    async def scenario(it: Rig) -> None:
        tokens = tuple(range(3, 27))
        given = replace(request_of(temperature=0.7, top_k=2), forced=tokens)
        completion, other = await asyncio.gather(
            it.engine.generate(given), it.engine.generate(request_of(1))
        )
        assert tuple(completion.tokens.tolist()) == tokens and len(other) == 24
        expected = reference(it.model, completion, 0.7)
        assert np.abs(completion.logprobs - expected).max() < 1e-4

    with_rig(scenario)


def test_greedy_output_equals_transformers_generate(with_rig: Any) -> None:
    async def scenario(it: Rig) -> None:
        completion = await it.engine.generate(request_of(temperature=0.0))
        expected = it.model.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert completion.tokens.tolist() == expected[0, len(PROMPT) :].tolist()

    with_rig(scenario)


def test_completion_depends_only_on_seed_not_on_batch_composition(with_rig: Any) -> None:
    async def scenario(it: Rig) -> None:
        alone = await it.engine.generate(request_of(3))
        batch = await asyncio.gather(*(it.engine.generate(request_of(n)) for n in range(20)))
        assert batch[3].tokens.tolist() == alone.tokens.tolist()
        assert len({tuple(completion.tokens.tolist()) for completion in batch}) == 20

    with_rig(scenario)


def test_abort_returns_partial_completion_and_ignores_unknown_ids(with_rig: Any) -> None:
    async def scenario(it: Rig) -> None:
        running = asyncio.create_task(it.engine.generate(request_of(tokens=130)))
        before = (await it.engine.stats()).tokens
        while (await it.engine.stats()).tokens < before + 3:
            await asyncio.sleep(0)
        await it.engine.abort(["r0-130-False", "unknown"])
        completion = await running
        assert completion.finish is Finish.ABORT and 3 <= len(completion) < 130
        assert (await it.engine.stats()).running == 0

    with_rig(scenario)


def test_resumed_completion_equals_uninterrupted_one(with_rig: Any) -> None:
    async def scenario(it: Rig) -> None:
        whole = await asyncio.gather(
            *(it.engine.generate(request_of(n, tokens=120)) for n in range(12))
        )
        before = (await it.engine.stats()).tokens
        running = [
            asyncio.create_task(it.engine.generate(request_of(n, tokens=120))) for n in range(12)
        ]
        while (await it.engine.stats()).tokens < before + 30:
            await asyncio.sleep(0)
        assert await it.engine.pause(OnSync.INTERRUPT) is True
        parts = [await task for task in running]
        assert all(part.finish is Finish.INTERRUPT for part in parts)
        assert any(len(part) for part in parts)
        waiting = [
            asyncio.create_task(it.engine.generate(request_of(n, tokens=120, partial=part)))
            for n, part in enumerate(parts)
        ]
        await asyncio.sleep(0)
        assert await it.engine.resume() is True
        for uninterrupted, task in zip(whole, waiting, strict=True):
            resumed = await task
            assert resumed.tokens.tolist() == uninterrupted.tokens.tolist()
            assert np.abs(resumed.logprobs - reference(it.model, resumed)).max() < 1e-4

    with_rig(scenario)


def test_partials_are_beginnings_of_completions_that_continue(with_rig: Any) -> None:
    async def scenario(it: Rig) -> None:
        before = (await it.engine.stats()).tokens
        running = {
            f"r{n}-120-False": asyncio.create_task(it.engine.generate(request_of(n, tokens=120)))
            for n in range(12)  # more than slots
        }
        while (await it.engine.stats()).tokens < before + 30:
            await asyncio.sleep(0)
        parts = dict(await it.engine.partials())
        whole = {name: await task for name, task in running.items()}
        assert parts and sum(map(len, parts.values())) < sum(map(len, whole.values()))
        for name, part in parts.items():
            assert 0 < len(part) <= len(whole[name])
            for array in ("tokens", "logprobs", "versions"):
                found = getattr(whole[name], array)[: len(part)]
                assert found.tolist() == getattr(part, array).tolist()
        again = [
            it.engine.generate(request_of(n, tokens=120, partial=parts[f"r{n}-120-False"]))
            for n in range(12)
            if f"r{n}-120-False" in parts
        ]
        sampled = (await it.engine.stats()).tokens
        continued = await asyncio.gather(*again)
        sampled = (await it.engine.stats()).tokens - sampled
        assert sampled == sum(map(len, continued)) - sum(map(len, parts.values()))
        for completion, name in zip(continued, sorted(parts, key=_number), strict=True):
            assert completion.tokens.tolist() == whole[name].tokens.tolist()

    with_rig(scenario)


def _number(name: str) -> int:
    return int(name[1:].partition("-")[0])


def test_drain_finishes_running_requests_and_delays_new_ones(with_rig: Any) -> None:
    async def scenario(it: Rig) -> None:
        running = asyncio.create_task(it.engine.generate(request_of(tokens=40)))
        await asyncio.sleep(0)
        assert await it.engine.pause(OnSync.DRAIN) is True
        assert (await running).finish is Finish.LENGTH
        late = asyncio.create_task(it.engine.generate(request_of(1)))
        tokens = (await it.engine.stats()).tokens
        assert (await it.engine.stats()).tokens == tokens and not late.done()
        assert await it.engine.resume() and len(await late) == 24

    with_rig(scenario)


def test_completions_use_new_weights_and_version_after_load(with_rig: Any) -> None:
    async def scenario(it: Rig) -> None:
        version = it.version
        old = await it.engine.generate(request_of())
        await it.engine.load_weights(it.change_weights())
        new = await it.engine.generate(request_of())
        assert set(old.versions) == {version} and set(new.versions) == {version + 1}
        assert np.abs(new.logprobs - reference(it.model, new)).max() < 1e-4
        assert np.abs(old.logprobs - reference(it.model, old)).max() > 1e-2

    with_rig(scenario)


def test_second_turn_has_logprobs_of_plain_forward_pass(with_rig: Any) -> None:
    """The KV cache of the first turn may be reused, but not after the weights have changed."""

    async def scenario(it: Rig) -> None:
        reused = (await it.engine.stats()).tokens_reused
        contexts = {n: PROMPT for n in range(6)}
        for turn in range(4):
            if turn == 3:
                await it.engine.load_weights(it.change_weights())
            done = await asyncio.gather(
                *(
                    it.engine.generate(Request(f"{turn}-{n}", context, n, Sampling(5 + n)))
                    for n, context in contexts.items()
                )
            )
            for n, completion in enumerate(done):
                expected = reference(it.model, completion, prompt=contexts[n])
                assert np.abs(completion.logprobs - expected).max() < 1e-4
                contexts[n] = (*contexts[n], *completion.tokens.tolist(), 3 + n, 9)
            before, reused = reused, (await it.engine.stats()).tokens_reused
            # Of the earlier turn, all but the last token; vLLM does not report it.
            known = sum(len(c) - (5 + n) - 2 - 2 - 1 for n, c in contexts.items())
            native = "native" in ENGINES[0]
            assert reused - before == (known if native and turn in (1, 2) else 0)

    with_rig(scenario)


def test_engine_generates_with_merged_adapters(
    with_rig: Any,
) -> None:
    async def scenario(it: Rig) -> None:
        trained = LoraDevice(copy.deepcopy(it.model), TrainSettings(lora=LoraSettings(rank=4)))
        with torch.no_grad():
            for name, parameter in trained.model.named_parameters():
                if "lora_B" in name:  # initialized to 0
                    parameter.copy_(
                        torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                    )
        plain = await it.engine.generate(request_of(temperature=0.0))
        await it.engine.load_weights(it.publish(trained.export_weights()))
        adapted = await it.engine.generate(request_of(temperature=0.0))
        expected = trained.model.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert adapted.tokens.tolist() == expected[0, len(PROMPT) :].tolist()
        assert adapted.tokens.tolist() != plain.tokens.tolist()
        assert np.abs(adapted.logprobs - reference(trained.model, adapted)).max() < 1e-4

    with_rig(scenario)


def test_swap_changes_version_within_running_completion(with_rig: Any) -> None:
    async def scenario(it: Rig) -> None:
        running = asyncio.create_task(it.engine.generate(request_of(tokens=130)))
        before = (await it.engine.stats()).tokens
        while (await it.engine.stats()).tokens < before + 5:
            await asyncio.sleep(0)
        await it.engine.pause(OnSync.SWAP)
        old, version = copy.deepcopy(it.model), it.version
        await it.engine.load_weights(it.change_weights())
        await it.engine.resume()
        completion = await running
        change = int(np.argmax(completion.versions == version + 1))
        versions = [version] * change + [version + 1] * (130 - change)
        assert 5 <= change < 130 and completion.versions.tolist() == versions
        expected = _swapped(old, it.model, completion, change)
        assert np.abs(completion.logprobs - expected).max() < 1e-4

    with_rig(scenario)


@torch.no_grad()
def _swapped(
    old: PreTrainedModel, new: PreTrainedModel, completion: Completion, change: int
) -> np.ndarray:
    """Return log-probs of the first `change` tokens under `old`, of the others under `new`."""
    tokens = completion.tokens.tolist()
    context = torch.tensor([[*PROMPT, *tokens[: change - 1]]])
    first = old(context, use_cache=True)
    before = torch.log_softmax(first.logits[0, len(PROMPT) - 1 :], -1)
    found = before[torch.arange(change), torch.tensor(tokens[:change])].tolist()
    cache = first.past_key_values
    for position in range(change, len(tokens)):
        step = new(torch.tensor([[tokens[position - 1]]]), past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        found.append(float(torch.log_softmax(step.logits[0, -1], -1)[tokens[position]]))
    return np.array(found)


@pytest.mark.fault("E2", "weights corrupted before an engine loads them")
def test_engine_keeps_old_weights_when_new_ones_are_corrupted(with_rig: Any, fault: Fault) -> None:
    async def scenario(it: Rig) -> None:
        old = await it.engine.generate(request_of())
        version, weights = it.version, it.change_weights()
        next(iter(it.block.tensors.values())).view(torch.int32).flatten()[0] += 1
        with pytest.raises(SyncError, match="are corrupted"):
            await it.engine.load_weights(weights)
        fault.fired()
        assert (await it.engine.stats()).version == version
        assert (await it.engine.generate(request_of())).tokens.tolist() == old.tokens.tolist()

    with_rig(scenario)


def test_generate_rejects_only_prompt_that_does_not_fit(with_rig: Any) -> None:
    async def scenario(it: Rig) -> None:
        good = asyncio.create_task(it.engine.generate(request_of()))
        with pytest.raises(RolloutError):
            await it.engine.generate(Request("long", (1,) * 5000, 0, Sampling(5)))
        assert len(await good) == 24

    with_rig(scenario)


def test_completion_ends_with_stop_token(with_rig: Any) -> None:
    async def scenario(it: Rig) -> None:
        free = await it.engine.generate(request_of())
        stop = int(free.tokens[10])
        stopped = await it.engine.generate(request_of(stop_token_ids=(stop,)))
        first = free.tokens.tolist().index(stop)
        assert stopped.finish is Finish.STOP
        assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()

    with_rig(scenario)


def test_completion_ends_with_stop_string(with_rig: Any) -> None:
    async def scenario(it: Rig) -> None:
        decode = make_tokenizer().decode
        free = await it.engine.generate(request_of())
        stop = decode(free.tokens[10:12].tolist())
        stopped = await it.engine.generate(request_of(stop=(stop,)))
        assert stopped.finish is Finish.STOP
        assert stopped.tokens.tolist() == free.tokens[: len(stopped)].tolist()
        assert stop in decode(stopped.tokens.tolist())
        assert stop not in decode(stopped.tokens[:-1].tolist())
        assert (await it.engine.stats()).running == 0

    with_rig(scenario)


def test_cancelled_request_frees_its_slot(with_rig: Any) -> None:
    async def scenario(it: Rig) -> None:
        running = [
            asyncio.create_task(it.engine.generate(request_of(n, tokens=130))) for n in range(20)
        ]
        before = (await it.engine.stats()).tokens
        while (await it.engine.stats()).tokens < before + 3:
            await asyncio.sleep(0)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        stats = await it.engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)

    with_rig(scenario)
