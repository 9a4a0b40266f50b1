"""The native rollout engine: sequences wait for a slot, are prefilled together, and then all live slots make one token per
step. Synchronous and driven from one thread; between two calls the weights may change.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from paceline.errors import ModelError, RolloutError
from paceline.rollout.native.model import Decoder
from paceline.rollout.native.sampling import Sampler, row_keys
from paceline.rollout.native.slots import Sequence as Running
from paceline.rollout.native.slots import Slots, already_ended
from paceline.rollout.native.weights import DecoderWeights, sliding_window
from paceline.types import Completion, Finish, Request

Finished = list[tuple[str, Completion]]

PREFILL_TOKENS = 1024  # per forward pass: bounds its memory


class NativeEngine:
    def __init__(
        self,
        config: PretrainedConfig,
        weights: DecoderWeights,
        *,
        slots: int,
        max_length: int,
        version: int = 0,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        """`slots`: sequences decoded at a time; `max_length`: tokens of prompt and answer together; `decode`: tokens to text,
        needed for stop strings."""
        window = sliding_window(config)
        if window is not None and max_length > window:
            raise ModelError(f"the model sees only {window} tokens back (sliding window): max_length {max_length} must not be above that")
        self._weights = weights
        self._model = Decoder(config, weights, slots, max_length)
        self._sampler = Sampler(len(weights.head), weights.head.device)
        self._slots = Slots(slots, max_length)
        self._decode = decode
        self._waiting: OrderedDict[str, Running] = OrderedDict()
        self._ended: dict[str, Completion] = {}  # were complete when they came in
        self._version = version
        self._epoch = 0  # counts changes of the weights
        self._tokens_sampled = self._tokens_prefilled = 0

    @property
    def running(self) -> int:
        return len(self._slots.live)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._ended)

    @property
    def has_work(self) -> bool:
        return bool(self._slots.live or self._waiting or self._ended)

    @property
    def version(self) -> int:
        return self._version

    @property
    def tokens_sampled(self) -> int:
        return self._tokens_sampled

    @property
    def tokens_prefilled(self) -> int:
        return self._tokens_prefilled

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue these; if one cannot be served, none is taken and RolloutError says why."""
        taken = {running.request.id for running in self._slots.live}
        for request in requests:
            self._check(request, taken)
            taken.add(request.id)
        for request in requests:
            running = Running.of(request)
            finish = already_ended(request, self._slots.max_length, self._decode)
            if finish is None:
                self._waiting[request.id] = running
            else:
                self._ended[request.id] = running.partial(finish)

    def step(self) -> Finished:
        """Admit what waits into free slots, make one token for every live sequence, return those that ended."""
        finished = list(self._ended.items())
        self._ended.clear()
        self._admit()
        slots, n = self._slots, self.running
        if n == 0:
            return finished
        positions = slots.position[:n]
        logits = self._model.decode(self._tensor(slots.last[:n]), self._tensor(positions), int(positions.max()))
        keys = row_keys(slots.seed[:n], positions + 1)
        tokens, logprobs = self._sampler.draw(logits, keys, slots.temperature[:n], slots.top_k[:n], slots.top_p[:n])
        if not np.isfinite(logprobs).all():
            raise RolloutError(f"a log-probability is not finite: the weights of version {self._version} hold inf or nan, or have diverged")
        slots.record(tokens, logprobs, self._version)
        self._tokens_sampled += n
        return finished + self._release(slots.ended(self._decode))

    def abort(self, ids: Sequence[str]) -> Finished:
        """Give these up and return what they have; unknown ids are ignored."""
        wanted = set(ids)
        finished = [(id, self._waiting.pop(id).partial(Finish.ABORT)) for id in wanted & self._waiting.keys()]
        finished += [(id, self._ended.pop(id)) for id in wanted & self._ended.keys()]
        rows = {row: Finish.ABORT for row, running in enumerate(self._slots.live) if running.request.id in wanted}
        return finished + self._release(rows)

    def interrupt(self) -> Finished:
        """Empty the engine: everything comes back as it stands, to be resumed from there."""
        finished = list(self._ended.items())
        finished += [(id, running.partial(Finish.INTERRUPT)) for id, running in self._waiting.items()]
        self._ended.clear()
        self._waiting.clear()
        return finished + self._release(dict.fromkeys(range(self.running), Finish.INTERRUPT))

    def load(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over new weights, all or none (SyncError). Running sequences go on with the keys and values they have."""
        self._weights.load(tensors)
        self.set_version(version)

    def set_version(self, version: int) -> None:
        """The weights have just been changed in place: from here on tokens are of this version."""
        self._version = version
        self._epoch += 1

    def _check(self, request: Request, taken: set[str]) -> None:
        sampling, vocabulary, longest = request.sampling, len(self._weights.embedding), self._slots.max_length
        made = 0 if request.partial is None else len(request.partial)
        problem = None
        if request.id in taken or request.id in self._waiting or request.id in self._ended:
            problem = "its id is already in use; ids must be unique among running and waiting requests"
        elif not request.prompt:
            problem = "its prompt is empty; at least one token is needed"
        elif len(request.prompt) + max(made, 1) > longest:
            problem = (
                f"{len(request.prompt)} prompt and {max(made, 1)} new tokens do not fit; shorten the prompt or raise max_length {longest}"
            )
        elif min(request.prompt) < 0 or max(request.prompt) >= vocabulary:
            problem = f"its prompt has token ids outside 0..{vocabulary - 1}; is the tokenizer the model's own?"
        elif sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            problem = f"temperature must be >= 0, top_p in (0, 1], top_k >= 0; got {sampling}"
        elif sampling.stop and self._decode is None:
            problem = "it has stop strings, but the engine was made without a `decode` function"
        if problem:
            raise RolloutError(f"request {request.id!r} cannot be generated: {problem}")

    def _admit(self) -> None:
        """Fill free slots, but not one by one: prefilling a few sequences costs nearly as much as prefilling one."""
        slots = self._slots
        free = slots.count - self.running
        if not self._waiting or free < min(len(self._waiting), max(1, slots.count // 8)):
            return
        chosen = [self._waiting.popitem(last=False)[1] for _ in range(min(free, len(self._waiting)))]
        # a live sequence with the same context still holds the keys and values of its prefill, unless the weights changed
        holders = {running.key: row for row, running in enumerate(slots.live) if running.epoch == self._epoch}
        first: dict[int, Running] = {}
        for running in chosen:
            if running.key not in holders:
                first.setdefault(running.key, running)
        new = sorted(first.values(), key=lambda running: -len(running.context))
        base = self.running
        self._prefill(new, base)
        holders |= {running.key: base + index for index, running in enumerate(new)}
        rest = sorted((running for running in chosen if first.get(running.key) is not running), key=lambda running: holders[running.key])
        for running in (*new, *rest):
            running.epoch = self._epoch
            slots.add(running)
        target = base + len(new)
        for key, copies in groupby(rest, key=lambda running: running.key):
            forked = list(copies)
            self._model.copy(holders[key], target, len(forked), len(forked[0].context) - 1)
            target += len(forked)

    def _prefill(self, sequences: list[Running], slot: int) -> None:
        """Keys and values of all but the last token of each context (longest first), which the decode step eats, into `slot`..."""
        while sequences and (length := len(sequences[0].context) - 1) > 0:
            n = max(1, min(len(sequences), PREFILL_TOKENS // length))
            tokens = np.zeros((n, length), np.int64)
            for row, running in enumerate(sequences[:n]):
                tokens[row, : len(running.context) - 1] = running.context[:-1]
                self._tokens_prefilled += len(running.context) - 1
            for start in range(0, length, PREFILL_TOKENS):
                self._model.prefill(self._tensor(tokens[:, start : start + PREFILL_TOKENS]), start, slot)
            sequences, slot = sequences[n:], slot + n

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._weights.head.device)

    def _release(self, rows: dict[int, Finish]) -> Finished:
        if not rows:
            return []
        slots = self._slots
        finished = [(slots.live[row].request.id, slots.completion(row, finish)) for row, finish in rows.items()]
        for source, target in slots.remove(list(rows)):
            self._model.copy(source, target, 1, int(slots.position[target]))
        return finished
