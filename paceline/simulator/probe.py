"""Probe: measures the costs of a device in some seconds, with the engine and trainer of a recipe.

Waits for: the workers of the recipe, which generate and train on random tokens. Nothing is saved.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist

import numpy as np
from transformers import PretrainedConfig

from paceline.config import RunConfig
from paceline.inputs import load_inputs
from paceline.model.loading import load_config
from paceline.remote.worker import Worker
from paceline.rollout.client import EngineClient
from paceline.simulator.costs import CostModel
from paceline.simulator.fit import Fit, fit_decode, fit_prefill, fit_train
from paceline.simulator.host import host_costs
from paceline.training.assembly import assemble
from paceline.types import Batch, Group, Prompt, Request, Role, Sampling, Trajectory, Turn
from paceline.workers.engines import engine_workers
from paceline.workers.layout import plan_that_fits
from paceline.workers.pools import open_workers
from paceline.workers.transport import open_transport

REPEATS = 3  # of which the median counts; fewer if they take long
ENOUGH_S = 0.5  # after which a measurement is not repeated
# Generated per sequence in a short and in a long wave, if the recipe allows it. Engines decode in
# bursts of up to 8 steps, also if a sequence ends within one: both are whole bursts.
FIRST_TOKENS, NEW_TOKENS = 8, 40
LONG_TOKENS = 104  # instead, after long prompts, whose prefill takes most of a wave
BOTH_S = 0.6  # the longest train step that is measured beside generation
PROMPTS = 64  # that are read to find their mean length
SIGMA = 0.8  # of the lengths of completions, as in a simulation without --lengths
BETWEEN = (8, 16, 32, 64)  # sequences, at which GPUs may change kernels
MOST_SLOWDOWN = 10.0  # of overlapping work; more is an error of the measurement
GENERATION_S, TRAINING_S = 15.0, 8.0  # no further load is measured after them

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Probe:
    """Measured points and the costs that were fitted to them."""

    config: RunConfig  # whose automatic settings have been chosen
    model: PretrainedConfig
    costs: CostModel
    prompt_tokens: int  # the mean of the recipe's prompts
    decode: tuple[tuple[int, int, float], ...]  # (sequences, context tokens, seconds of a step)
    prefill: tuple[tuple[int, int, float], ...]  # (sequences, tokens, seconds)
    train: tuple[tuple[int, int, float], ...]  # (tokens, tokens before each of them, seconds)
    errors: dict[str, Fit]


async def probe(config: RunConfig, report: Report = lambda what: None) -> Probe:
    """Start the recipe's engine and trainer, measure them and fit the costs."""
    inputs, roles = load_inputs(config), [Role.ACTOR, Role.ROLLOUT]
    lengths = [len(inputs.source[seq].tokens) for seq in range(PROMPTS)]
    layout = await plan_that_fits(config, inputs.model_path, roles)
    config = layout.config
    model = load_config(inputs.model_path)
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        report("starting the engine and the trainer")
        _, plans, workers = await open_workers(stack, config, roles, inputs.model_path, logs)
        engine = EngineClient(engine_workers(config, plans, workers[Role.ROLLOUT])[0])
        prompt = round(statistics.mean(lengths))
        found = await _Measurement(config, engine, workers, model, prompt, report).run()
    host = await host_costs(config, inputs)
    return replace(found, costs=found.costs.model_copy(update=host))


class _Measurement:
    def __init__(
        self,
        config: RunConfig,
        engine: EngineClient,
        workers: dict[Role, list[Worker]],
        model: PretrainedConfig,
        prompt: int,
        report: Report,
    ) -> None:
        self._config, self._engine, self._workers = config, engine, workers
        self._model, self._prompt, self._report = model, max(2, prompt), report
        self._vocabulary = model.get_text_config().vocab_size
        self._random = np.random.default_rng(0)
        longest = config.rollout.max_response_length
        whole = min(NEW_TOKENS, longest // FIRST_TOKENS * FIRST_TOKENS)
        # Shorter completions than two bursts are measured as they are: too fast on a GPU.
        self._first, self._new = (FIRST_TOKENS, whole) if whole > FIRST_TOKENS else (1, longest)
        self._long = LONG_TOKENS if longest >= 2 * LONG_TOKENS else self._new
        self._updates: list[tuple[float, list[int]]] = []  # seconds, and the lengths of the rows
        self._number = 0

    async def run(self) -> Probe:
        publish_s, load_s = await self._sync()
        decode, prefill = await self._generation()
        train = await self._training()
        slots = self._config.slots
        full = max(decode, key=lambda point: (point[0] == slots, point[2]))  # the longest of them
        slowdown = {} if self._config.takes_turns else await self._both(full[2])
        fits = {
            "decode": fit_decode(decode),
            "prefill": fit_prefill(prefill),
            "train": fit_train(train),
        }
        counts = sorted({sequences for sequences, *_ in decode})
        *steps, context_s = fits["decode"].coefficients
        _, prefill_token_s, prefill_sequence_s = fits["prefill"].coefficients
        train_step_s, train_token_s, train_context_s = fits["train"].coefficients
        costs = CostModel(
            # A fit of noisy points may give one of them no time at all; others stand for it.
            decode_points=[point for point in zip(counts, steps, strict=True) if point[1] > 0],
            decode_context_s=context_s,
            prefill_token_s=prefill_token_s,
            prefill_sequence_s=prefill_sequence_s,
            train_step_s=train_step_s,
            train_token_s=train_token_s * self._train_ranks,
            train_context_s=train_context_s * self._train_ranks,
            publish_s=publish_s,
            load_s=load_s,
            fit_error=max(fit.error for fit in fits.values()),
            **slowdown,
        )
        return Probe(
            self._config,
            self._model,
            costs,
            self._prompt,
            tuple(decode),
            tuple(prefill),
            tuple(train),
            fits,
        )

    @property
    def _train_ranks(self) -> int:
        """Devices that trained; the cost of a token is that of one device."""
        return self._config.placement.train_ranks or 1

    # --- generation ---

    async def _generation(
        self,
    ) -> tuple[list[tuple[int, int, float]], list[tuple[int, int, float]]]:
        """Measure waves of sequences: all of them start and end together.

        Contexts of different lengths are measured in one wave, as a run has them: an engine may
        read the KV cache of all sequences up to the longest one. Sequences share prompts, also as
        in a run, but not longer contexts, which stand for completions: GPUs read the shared part
        of a KV cache faster. Waves of different prompts tell the cost of a prompt from that of its
        sequences.
        """
        decode: list[tuple[int, int, float]] = []
        prefill: list[tuple[int, int, float]] = []
        end = time.perf_counter() + GENERATION_S
        for sequences, prompt in self._waves():
            if time.perf_counter() > end and len(decode) > 1:  # one point has no slope
                break
            self._report(f"measuring {sequences} sequences with contexts of {prompt} tokens")
            spread, first = prompt - self._prompt, self._first
            new = self._long if spread else self._new
            shared = not spread and sequences >= 2 * self._config.group_size
            size = self._config.group_size if shared else 1
            wave = partial(self._wave, sequences, prompt, spread=spread, size=size)
            begun = await wave(first)
            step_s = (await wave(new) - begun) / (new - first) if new > first else begun / first
            decode.append((sequences, sequences * (prompt + (first + new) // 2), step_s))
            if spread:  # shorter prompts may be padded, which those of a run rarely are
                continue
            for each in dict.fromkeys((size, 1)):
                took = begun if each == size else await self._wave(sequences, prompt, first)
                fed = -(-sequences // each) * (prompt - 1)
                prefill.append((sequences, fed, took - first * step_s))
        known = [point for point in prefill if point[2] > 0]
        return above_zero(decode), known or [(1, self._prompt, 1e-7)]

    def _waves(self) -> list[tuple[int, int]]:
        """Return loads as (sequences, context), those first that say most."""
        slots, room = self._config.slots, self._config.rollout.max_response_length - self._long
        every, eighth, half = (max(1, slots // part) for part in (1, 8, 2))
        context = self._prompt + room // 2
        counts = [every, eighth, half, 1, *sorted({*BETWEEN, slots // 4})]
        waves = [(n, self._prompt) for n in counts if 0 < n <= slots]
        waves[3:3] = [(half, context), (eighth, context)]
        return list(dict.fromkeys([*waves, (every, context), (1, context)]))

    async def _wave(
        self, sequences: int, prompt: int, new: int, spread: int = 0, size: int = 1
    ) -> float:
        """Return the seconds in which the engine works on a wave. See `_requests`.

        The controller's part is in `host_completion_s`.
        """

        async def measure() -> float:
            requests = self._requests(sequences, prompt, new, spread, size)
            before = (await self._engine.stats()).busy_s
            await self._generate(requests)
            return (await self._engine.stats()).busy_s - before

        return await _usual(measure)

    async def _generate(self, requests: Sequence[Request]) -> None:
        self._completions = await asyncio.gather(*map(self._engine.generate, requests))

    def _requests(
        self, sequences: int, prompt: int, new: int, spread: int = 0, size: int = 1
    ) -> list[Request]:
        """Return requests for `new` tokens each, with prompts of `prompt` tokens on average.

        The longest prompts have `spread` tokens more. Each has `size` sequences.
        """
        sampling, requests = Sampling(max_new_tokens=new), list[Request]()
        for number in range(sequences):
            self._number += 1
            if number % size == 0:
                end = min(number + size, sequences)
                tokens = self._tokens(prompt + round(spread * ((number + end) / sequences - 1)))
            requests.append(Request(f"{self._number}.0.0", tokens, self._number, sampling))
        return requests

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.integers(0, self._vocabulary, count).tolist())

    # --- training ---

    async def _training(self) -> list[tuple[int, int, float]]:
        rows = self._config.groups_per_step * self._config.group_size
        longest = self._config.rollout.max_response_length // 2
        shapes = [(max(1, rows // part), self._new) for part in (8, 2)]
        shapes += [(max(1, rows // part), max(self._new, longest)) for part in (32, 8)]
        shapes += [(rows, self._new)]
        shapes += [(max(1, rows // part), max(self._new, longest)) for part in (4, 2, 1)]
        points: list[tuple[int, int, float]] = []
        begun = time.perf_counter()
        for count, new in dict.fromkeys(shapes):
            lengths = self._lengths(count, new)
            tokens, before = self._fed(lengths)
            known = max((s / n for n, _, s in points), default=0.0)
            if len(points) > 1:
                expected = time.perf_counter() - begun + 2 * known * tokens
                if expected > TRAINING_S:
                    continue
            self._report(f"measuring a train step of {tokens:,} tokens")
            seconds = await _usual(partial(self._update, self._batch(lengths)))
            points.append((tokens, before, seconds))
            self._updates.append((seconds, lengths))
        return points

    async def _update(self, batch: Batch) -> float:
        """Return the seconds of a train step."""
        begun = time.perf_counter()
        await self._workers[Role.ACTOR][0].call(Role.ACTOR, "update", batch, 0, 0.0)
        return time.perf_counter() - begun

    def _lengths(self, rows: int, mean: int) -> list[int]:
        """Return lengths that vary as those of a run: a trainer may pad rows to the longest."""
        longest = self._config.rollout.max_response_length
        quantiles = (np.arange(rows) + 0.5) / rows
        spread = np.exp(SIGMA * np.array([NormalDist().inv_cdf(q) for q in quantiles]))
        lengths = np.clip(np.rint(spread * mean / spread.mean()), 1, longest).astype(int)
        return self._random.permutation(lengths).tolist()

    def _fed(self, lengths: Sequence[int]) -> tuple[int, int]:
        """Return the tokens of a batch, and the tokens before each of them.

        The rows of a group share their prompt.
        """
        prompts, prompt = -(-len(lengths) // self._config.group_size), self._prompt
        own = sum(2 * prompt * length + length**2 for length in lengths)
        return prompts * prompt + sum(lengths), (prompts * prompt**2 + own) // 2

    def _batch(self, lengths: Sequence[int]) -> Batch:
        """Return a batch of random tokens whose advantages have both signs."""
        completion, size = self._completions[0], self._config.group_size
        groups = []
        for seq, first in enumerate(range(0, len(lengths), size)):
            prompt = self._tokens(self._prompt)
            made = [
                replace(
                    completion,
                    tokens=np.array(self._tokens(new), np.int32),
                    logprobs=np.resize(completion.logprobs, new),
                    versions=np.resize(completion.versions, new),
                )
                for new in lengths[first : first + size]
            ]
            trajectories = tuple(Trajectory((Turn(prompt, each),), "", 0.0) for each in made)
            groups.append(Group(seq, Prompt(str(seq), prompt, "", {}), trajectories, 0, 0))
        batch = assemble(groups)
        signs = self._random.standard_normal(batch.num_tokens).astype(np.float32)
        return replace(batch, advantages=np.where(batch.mask, signs, 0).astype(np.float32))

    # --- both at the same time ---

    async def _both(self, step_s: float) -> dict[str, float]:
        """Return how much engine and trainer slow each other down on one device or machine.

        `step_s`: seconds of a decode step of all slots.
        """
        self._report("measuring generation and training at the same time")
        short = [each for each in self._updates if each[0] <= BOTH_S] or self._updates[:1]
        train_s, lengths = max(short, key=lambda each: each[0])
        slots, size = self._config.slots, self._config.group_size
        # Generation that takes about as long.
        new = max(self._new, min(round(train_s / step_s), self._config.rollout.max_response_length))
        update = partial(self._update, self._batch(lengths))

        async def generate() -> float:
            requests = self._requests(slots, self._prompt, new, size=size)
            begun = time.perf_counter()
            await self._generate(requests)
            return time.perf_counter() - begun

        alone = await _usual(generate), await _usual(update)
        found = [
            slowdowns(*alone, *await asyncio.gather(generate(), update()))
            for _ in range(2 * REPEATS)
        ]
        decode, train = (statistics.median(each) for each in zip(*found, strict=True))
        where = "overlap" if self._config.placement.overlap else "pool"
        return {f"{where}_decode": decode, f"{where}_train": train}

    # --- weight sync ---

    async def _sync(self) -> tuple[float, float]:
        """Return the seconds to publish and to load weights, with the recipe's transport."""
        self._report("measuring the weight sync")
        transport = await open_transport(self._config, self._workers)
        published, loaded = [], []
        for version in range(1, REPEATS + 1):
            begun = time.perf_counter()
            weights = await transport.publish(version)
            middle = time.perf_counter()
            await self._engine.load_weights(weights)
            published.append(middle - begun)
            loaded.append(time.perf_counter() - middle)
        return statistics.median(published), statistics.median(loaded)


async def _usual(measure: Callable[[], Awaitable[float]]) -> float:
    """Return the median of some measurements, fewer if they take long.

    The first one, which compiles and allocates, does not count.
    """
    await measure()
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) < ENOUGH_S:
        seconds.append(await measure())
    return statistics.median_low(seconds)


def slowdowns(
    decode_s: float, train_s: float, decode_end: float, train_end: float
) -> tuple[float, float]:
    """Return the slowdown of two works that start together, from their times alone and their ends.

    The one that ends first was slowed all the time, the other one until then.
    """
    if train_end > decode_end:
        train, decode = slowdowns(train_s, decode_s, train_end, decode_end)
        return decode, train
    left = decode_s - (decode_end - train_end)  # work of the engine beside the trainer
    decode = train_end / left if left > train_end / MOST_SLOWDOWN else MOST_SLOWDOWN
    return max(1.0, decode), min(MOST_SLOWDOWN, max(1.0, train_end / train_s))


def above_zero(decode: Sequence[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """Return the points whose time is above 0: the difference of two times, of which another
    program may have delayed the shorter one. A step at that load would seem to take no time."""
    known = [point for point in decode if point[2] > 0]
    return known or [(sequences, context, 1e-7) for sequences, context, _ in decode]


def summary(found: Probe) -> Sequence[str]:
    """Describe the costs and how well they fit, a line each."""
    costs, errors = found.costs, found.errors
    decode, train = costs.pool_decode, costs.pool_train
    if found.config.placement.overlap:
        decode, train = costs.overlap_decode, costs.overlap_train
    steps = ", ".join(f"{n}: {seconds * 1e3:.3g} ms" for n, seconds in costs.decode_points)
    return (
        f"decode step by sequences: {steps}; + {costs.decode_context_s * 1e9:.3g} ns per token in "
        f"the KV cache (error {errors['decode'].error:.0%})",
        f"prefill: {costs.prefill_token_s * 1e6:.3g} µs per token + "
        f"{costs.prefill_sequence_s * 1e6:.3g} µs per sequence "
        f"(error {errors['prefill'].error:.0%})",
        f"train step: {costs.train_step_s * 1e3:.3g} ms + {costs.train_token_s * 1e6:.3g} µs per "
        f"token + {costs.train_context_s * 1e9:.3g} ns per token before it in its row "
        f"(error {errors['train'].error:.0%})",
        f"weight sync: {costs.publish_s * 1e3:.3g} ms to publish, {costs.load_s * 1e3:.3g} ms to "
        "load",
        f"controller: {costs.host_completion_s * 1e6:.3g} µs per completion + "
        f"{costs.host_trained_s * 1e6:.3g} µs while the trainer waits",
        *(
            []
            if found.config.takes_turns
            else [
                f"at the same time: generation takes {decode:.2f}x as long, training {train:.2f}x"
            ]
        ),
    )
