"""The native rollout engine: continuous batching of sequences over a fixed number of slots.

Sequences wait for a slot and are prefilled together; then all live slots decode in bursts of steps.
The engine is synchronous and runs on one thread. The weights may change between two calls.

A backend may run ahead, that is, start a burst before the previous one has been read. The engine
then drops the tokens after the end of a sequence and those of aborted sequences.

The KV cache of a finished sequence is kept until the weights change or its memory is needed. A
request that continues its tokens, such as the next turn of a conversation, reuses it.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from paceline.errors import RolloutError
from paceline.model.releasable import ReleasableMemory
from paceline.model.shape import position_limit
from paceline.model.weights import EngineWeights
from paceline.remote.device_clock import PREFILL, SWITCHING, doing
from paceline.rollout.native.backend import Backend, PrefillChunk, choose_backend
from paceline.rollout.native.cache import Cache
from paceline.rollout.native.pending import InFlightBurst, PendingPrefill
from paceline.rollout.native.slots import Sequence as Running
from paceline.rollout.native.slots import Slots, already_ended, check_request
from paceline.types import Completion, Finish, Request

Finished = list[tuple[str, Completion]]


class NativeEngine:
    def __init__(
        self,
        config: PretrainedConfig,
        weights: EngineWeights,
        *,
        slots: int,
        max_length: int,
        version: int = 0,
        decode: Callable[[list[int]], str] | None = None,
        kv_memory_fraction: float = 0.5,
        kv_dtype: torch.dtype | None = None,
        backend: Backend | None = None,
    ) -> None:
        """Create an engine.

        slots: number of sequences decoded concurrently.
        max_length: maximum tokens of prompt and completion together.
        decode: converts tokens to text; required for stop strings.
        kv_memory_fraction: fraction of a GPU's free memory for the KV cache.
        kv_dtype: type of the KV cache if it is not that of the weights (FP8).
        """
        max_length = min(max_length, position_limit(config) or max_length)
        self._weights, self._memory = weights, ReleasableMemory(weights.named.values())
        self._vocabulary = weights.vocabulary
        self._backend = backend or choose_backend(
            config, weights, slots, max_length, kv_memory_fraction, kv_dtype
        )
        self._slots = Slots(slots, max_length)
        self._cache = Cache(self._backend, max_length)
        self._decode = decode
        self._ids: set[str] = set()  # of all requests that have not been returned
        self._waiting: OrderedDict[str, Running] = OrderedDict()
        self._prefilling: list[PendingPrefill] = []
        self._in_flight: deque[InFlightBurst] = deque()
        self._ended: dict[str, Completion] = {}  # complete, to be returned by the next step
        self._asleep = self._sync_expected = False
        self._arrivals = count()
        self._version = version
        self._epoch = 0  # number of weight changes
        self._tokens_sampled = self._tokens_prefilled = self._tokens_reused = 0

    @property
    def slots(self) -> int:
        return self._slots.count

    @property
    def kv_used(self) -> float:
        """Fraction of the KV cache in use; kept contexts are not, because they give way."""
        used = self._cache.used
        return self.running / self.slots if used is None else used

    @property
    def running(self) -> int:
        return len(self._slots.live) + sum(len(pending.sequences) for pending in self._prefilling)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._ended)

    @property
    def has_work(self) -> bool:
        return bool(self._slots.live or self._waiting or self._ended or self._prefilling)

    @property
    def version(self) -> int:
        return self._version

    @property
    def tokens_sampled(self) -> int:
        return self._tokens_sampled

    @property
    def tokens_prefilled(self) -> int:
        return self._tokens_prefilled

    @property
    def tokens_reused(self) -> int:
        """Tokens that were not prefilled, because an earlier sequence left them in the KV cache."""
        return self._tokens_reused

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all requests, or none: raise RolloutError if one of them cannot be served."""
        limits = self._slots.max_length, self._vocabulary, self._decode is not None
        new = set[str]()
        for request in requests:
            check_request(request, request.id in self._ids or request.id in new, *limits)
            if request.forced:
                raise RolloutError(f"request {request.id!r}: only vLLM can take given tokens")
            new.add(request.id)
        self._ids |= new
        for request in requests:
            running = Running.of(request)
            finish = already_ended(request, self._slots.max_length, self._decode)
            if finish is None:
                self._waiting[request.id] = running
            else:
                self._ended[request.id] = running.partial(finish)

    def step(self) -> Finished:
        """Admit waiting sequences, start a burst and return the sequences that ended."""
        self.wake()
        finished = list(self._ended.items())
        self._ended.clear()
        self._admit()
        started = self._start(finished)
        if self._in_flight and (not started or len(self._in_flight) > self._backend.ahead):
            finished += self._collect()
        return self._returned(finished)

    def abort(self, ids: Sequence[str]) -> Finished:
        """Abort these requests and return their partial completions; ignore unknown IDs."""
        wanted = set(ids)
        for pending in list(self._prefilling):
            if any(running.request.id in wanted for running in pending.sequences):
                self._cancel_prefill(pending)
        finished = [
            (id, self._waiting.pop(id).partial(Finish.ABORT))
            for id in wanted & self._waiting.keys()
        ]
        finished += [(id, self._ended.pop(id)) for id in wanted & self._ended.keys()]
        rows = {
            row: Finish.ABORT
            for row, running in enumerate(self._slots.live)
            if running.request.id in wanted
        }
        return self._returned(finished + self._release(rows))

    def interrupt(self) -> Finished:
        """Remove all requests and return their partial completions, which can be resumed."""
        self._collect_all()
        while self._prefilling:
            self._cancel_prefill(self._prefilling[-1])
        finished = list(self._ended.items())
        finished += [
            (id, running.partial(Finish.INTERRUPT)) for id, running in self._waiting.items()
        ]
        self._ended.clear()
        self._waiting.clear()
        rows = dict.fromkeys(range(self.running), Finish.INTERRUPT)
        return self._returned(finished + self._release(rows))

    def partials(self) -> Finished:
        """Return the tokens so far of all requests, which continue. Bursts in flight are not
        waited for."""
        unslotted = [*self._waiting.values()]
        unslotted += [running for pending in self._prefilling for running in pending.sequences]
        found = [(running.request.id, running.partial(Finish.INTERRUPT)) for running in unslotted]
        found += [
            (running.request.id, self._slots.completion(row, Finish.INTERRUPT))
            for row, running in enumerate(self._slots.live)
        ]
        return [*self._ended.items(), *(each for each in found if len(each[1]))]

    def wait_idle(self) -> None:
        """Wait for the bursts in flight, so that nothing reads the weights, which may change.

        The next step returns the sequences that ended.
        """
        self._collect_all()
        self._cache.drop_kept()
        self._backend.weights_may_change()

    def expect_sync(self) -> None:
        """Limit bursts to about 2 ms until the weights change, so that the change waits less.

        It can be called from another thread.
        """
        self._sync_expected = True

    def load(
        self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int
    ) -> None:
        """Load all weights, or raise SyncError and load none.

        Running sequences continue on the KV cache they have.
        """
        self._cache.drop_kept()
        with self._backend.changing_weights():
            self._memory.restore()
            self._weights.load(tensors)
        self._version, self._sync_expected = version, False
        self._epoch += 1

    def set_version(self, version: int) -> None:
        """Set the version of the next tokens after the weights were changed in place.

        Call `wait_idle` before the change.
        """
        self._cache.drop_kept()
        with self._backend.changing_weights():
            self._version, self._sync_expected = version, False
            self._epoch += 1

    def sleep(self) -> None:
        """Free the KV cache. Running sequences wait and are prefilled again after `wake`."""
        if self._asleep:
            return
        with doing(SWITCHING):
            self.wait_idle()
            while self._prefilling or self._slots.live:
                self._preempt()
            self._backend.sleep()
        self._asleep = True

    def release(self) -> None:
        """Free the KV cache and the weights, which must be the engine's own, until `load`."""
        self.sleep()
        self._memory.release()

    def cache_bytes(self) -> int:
        return 0 if self._asleep else self._backend.cache_bytes()

    def wake(self) -> None:
        """Undo `sleep`; a step does so implicitly."""
        if self._asleep:
            with doing(SWITCHING):
                self._backend.wake()
            self._asleep = False

    def _admit(self) -> None:
        slots = self._slots
        free = slots.count - self.running
        if self._waiting and free >= min(
            len(self._waiting), max(1, slots.count // self._backend.admit_divisor)
        ):
            self._select(free)
        if self._prefilling:
            self._prefill()

    def _select(self, free: int) -> None:
        """Take up to `free` waiting sequences while there is memory, and group equal contexts."""
        # The cache of a live sequence with the same context is valid unless the weights changed.
        live = {
            running.key: running for running in self._slots.live if running.epoch == self._epoch
        }
        prefills: dict[int, PendingPrefill] = {}
        for _ in range(min(free, len(self._waiting))):
            running = next(iter(self._waiting.values()))
            pending, holder = prefills.get(running.key), live.get(running.key)
            source = pending.source if pending else holder
            done = self._cache.reserve(running, source, self._epoch)
            if done is None:
                break
            del self._waiting[running.request.id]
            running.epoch, running.arrival = self._epoch, next(self._arrivals)
            if pending:
                pending.copies.append(running)
            elif holder:
                prefills[running.key] = PendingPrefill(holder, [running], new=False, done=0)
            else:
                prefills[running.key] = PendingPrefill(running, [], new=True, done=done)
                self._tokens_reused += done
        self._prefilling += sorted(prefills.values(), key=lambda pending: -pending.left)

    def _prefill(self) -> None:
        """Prefill within the backend's token budget and start sequences with a complete context."""
        slots, base = self._slots, len(self._slots.live)
        budget = self._backend.prefill_tokens if base else 1 << 62
        chunks = []
        for pending in self._prefilling:
            if (tokens := min(pending.left, budget)) > 0:
                chunks.append(PrefillChunk(pending.source, pending.done, pending.done + tokens))
                pending.done += tokens
                budget -= tokens
                self._tokens_prefilled += tokens
        complete = [pending for pending in self._prefilling if pending.left == 0]
        self._prefilling = [pending for pending in self._prefilling if pending.left]
        arriving = [pending.source for pending in complete if pending.new]
        target = base + len(arriving)
        arriving += [running for pending in complete for running in pending.copies]
        self._backend.settle(arriving, base)
        if chunks:
            with doing(None if self._backend.ahead else PREFILL):  # a GPU has a timer
                self._backend.prefill(chunks, base)
        for running in arriving:
            slots.add(running)
        rows = {id(running): row for row, running in enumerate(slots.live)}
        for pending in complete:
            if pending.copies:
                self._backend.fork(pending.source, rows[id(pending.source)], pending.copies, target)
                target += len(pending.copies)
        self._backend.place(slots, base)

    def _start(self, finished: Finished) -> bool:
        """Start the next burst, unless the bursts in flight complete all live sequences."""
        slots = self._slots
        while n := len(slots.live):
            now, limit = slots.position[:n] + slots.ahead[:n], slots.limit[:n]
            if not (now < limit).any():
                return False
            steps = self._backend.steps(n, self._sync_expected)
            if self._cache.grow(slots, np.minimum(now + steps, limit)):
                burst = self._backend.decode(slots, steps)
                arrivals = slots.arrival[:n].copy()
                self._in_flight.append(InFlightBurst(burst, steps, arrivals, self._version))
                slots.ahead[:n] += steps
                return True
            if self._in_flight:
                finished += self._collect()
            else:
                self._preempt()
        return False

    def _collect(self) -> Finished:
        """Read the tokens of the oldest burst in flight."""
        oldest, slots = self._in_flight.popleft(), self._slots
        rows, columns = oldest.still_in(slots)
        slots.ahead[rows] -= oldest.steps
        going = slots.position[rows] < slots.limit[rows]
        rows, columns = rows[going], columns[going]
        tokens, logprobs = oldest.burst.result()
        ended: dict[int, Finish] = {}
        for step in range(oldest.steps):
            if not np.isfinite(logprobs[step, columns]).all():
                raise RolloutError(
                    f"a log-prob is not finite: the weights of version {oldest.version} "
                    "contain inf or nan, or training has diverged"
                )
            slots.record(rows, tokens[step, columns], logprobs[step, columns], oldest.version)
            self._tokens_sampled += len(rows)
            if stopped := slots.ended(rows, self._decode):
                ended |= stopped
                going = np.ones(slots.count, bool)
                going[list(stopped)] = False
                rows, columns = rows[going[rows]], columns[going[rows]]
        return self._release(ended)

    def _collect_all(self) -> None:
        while self._in_flight:
            self._ended.update(self._collect())

    def _returned(self, finished: Finished) -> Finished:
        self._ids.difference_update(id for id, _ in finished)
        return finished

    def _release(self, rows: dict[int, Finish]) -> Finished:
        slots = self._slots
        finished = [
            (slots.live[row].request.id, slots.completion(row, finish))
            for row, finish in rows.items()
        ]
        # A waiting sequence would take the slot, and the memory with it.
        useless = self._waiting and self._backend.kept_in_slots
        for row, finish in rows.items():
            if finish is Finish.ABORT or useless or not self._cache.keep(slots, row, self._epoch):
                self._backend.free(slots.live[row])
        self._remove(list(rows))
        return finished

    def _remove(self, rows: list[int]) -> None:
        if rows:
            self._backend.move(self._slots, self._slots.remove(rows))

    def _preempt(self) -> None:
        """Return the latest sequence to the queue, with its tokens, to free its memory."""
        if self._prefilling:
            self._cancel_prefill(self._prefilling[-1])
            return
        live = self._slots.live
        row = max(range(len(live)), key=lambda row: live[row].arrival)
        request = live[row].request
        self._requeue(
            Running.of(replace(request, partial=self._slots.completion(row, Finish.INTERRUPT)))
        )
        self._backend.free(live[row])
        self._remove([row])

    def _cancel_prefill(self, pending: PendingPrefill) -> None:
        self._prefilling.remove(pending)
        for running in reversed(pending.sequences):
            self._backend.free(running)
            self._requeue(running)

    def _requeue(self, running: Running) -> None:
        self._waiting[running.request.id] = running
        self._waiting.move_to_end(running.request.id, last=False)
