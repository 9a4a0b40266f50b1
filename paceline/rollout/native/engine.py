"""The native rollout engine: sequences wait for a slot, are prefilled together, and then all live slots make tokens in bursts of
decode steps. Synchronous and driven from one thread; between two calls the weights may change.

A backend may run ahead: a burst is started before the one before it has been looked at. A sequence that has stopped by then makes
some tokens too many, which are cut off; those of a sequence that is given up are dropped.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from torch import Tensor
from transformers import PretrainedConfig

from paceline.errors import RolloutError
from paceline.model.shape import position_limit
from paceline.model.weights import EngineWeights
from paceline.rollout.native.backend import Backend, Burst, PrefillChunk, choose_backend
from paceline.rollout.native.slots import Sequence as Running
from paceline.rollout.native.slots import Slots, already_ended, refusal
from paceline.types import Completion, Finish, Request

Finished = list[tuple[str, Completion]]


@dataclass(slots=True, eq=False)
class PendingPrefill:
    """A context on its way into the cache: of `source`, a new sequence, and of `copies` with the same one. A `source` that is
    live already has it, so that nothing remains to be done."""

    source: Running
    copies: list[Running]
    new: bool
    done: int  # tokens of it in the cache

    @property
    def sequences(self) -> list[Running]:
        return [self.source, *self.copies] if self.new else self.copies

    @property
    def left(self) -> int:
        return (
            len(self.source.context) - 1 - self.done if self.new else 0
        )  # the decode step eats the last token


@dataclass(frozen=True, slots=True)
class InFlightBurst:
    """A burst that has been started, and for whom."""

    burst: Burst
    steps: int
    sequences: list[Running]  # by row
    version: int


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
        brief: bool = False,
        backend: Backend | None = None,
    ) -> None:
        """`slots`: sequences decoded at a time; `max_length`: tokens of prompt and answer together; `decode`: tokens to text,
        needed for stop strings; `kv_memory_fraction`: of a GPU's free memory, for keys and values; `brief`: bursts of about 2 ms at most,
        since whoever brings new weights while it works has to wait for the one under way."""
        max_length = min(max_length, position_limit(config) or max_length)
        self._weights = weights
        self._backend = backend or choose_backend(
            config, weights, slots, max_length, kv_memory_fraction, brief
        )
        self._slots = Slots(slots, max_length)
        self._decode = decode
        self._waiting: OrderedDict[str, Running] = OrderedDict()
        self._filling: list[PendingPrefill] = []
        self._flights: deque[InFlightBurst] = deque()
        self._ended: dict[str, Completion] = {}  # complete, to be returned by the next step
        self._asleep = False
        self._arrivals = count()
        self._version = version
        self._epoch = 0  # counts changes of the weights
        self._tokens_sampled = self._tokens_prefilled = 0

    @property
    def slots(self) -> int:
        return self._slots.count

    @property
    def kv_used(self) -> float:
        """Share of the memory for keys and values that is taken."""
        used = self._backend.kv_used()
        return self.running / self.slots if used is None else used

    @property
    def running(self) -> int:
        return len(self._slots.live) + sum(len(filling.sequences) for filling in self._filling)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._ended)

    @property
    def has_work(self) -> bool:
        return bool(self._slots.live or self._waiting or self._ended or self._filling)

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
        taken.update(
            running.request.id for filling in self._filling for running in filling.sequences
        )
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
        """Admit what waits into free slots, start a burst of tokens for every live sequence, return those that ended."""
        self.wake()
        finished = list(self._ended.items())
        self._ended.clear()
        self._admit()
        started = self._start(finished)
        if self._flights and (not started or len(self._flights) > self._backend.ahead):
            finished += self._land()
        return finished

    def abort(self, ids: Sequence[str]) -> Finished:
        """Give these up and return what they have; unknown ids are ignored."""
        wanted = set(ids)
        for filling in [
            f for f in self._filling if any(running.request.id in wanted for running in f.sequences)
        ]:
            self._unfill(filling)
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
        return finished + self._release(rows)

    def interrupt(self) -> Finished:
        """Empty the engine: everything comes back as it stands, to be resumed from there."""
        self.wait_idle()
        while self._filling:
            self._unfill(self._filling[-1])
        finished = list(self._ended.items())
        finished += [
            (id, running.partial(Finish.INTERRUPT)) for id, running in self._waiting.items()
        ]
        self._ended.clear()
        self._waiting.clear()
        return finished + self._release(dict.fromkeys(range(self.running), Finish.INTERRUPT))

    def wait_idle(self) -> None:
        """Wait for the bursts under way, so that nothing reads the weights any more. What has ended comes with the next step."""
        while self._flights:
            self._ended.update(self._land())

    def load(
        self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int
    ) -> None:
        """Take over new weights, all or none (SyncError). Running sequences go on with the keys and values they have."""
        with self._backend.changing_weights():
            self._weights.load(tensors)
        self._version = version
        self._epoch += 1

    def set_version(self, version: int) -> None:
        """The weights have just been changed in place (after `settle`): from here on tokens are of this version."""
        with self._backend.changing_weights():
            self._version = version
            self._epoch += 1

    def sleep(self) -> None:
        """Give the memory of keys and values back. Running sequences wait, and are prefilled again after `wake`."""
        if self._asleep:
            return
        self.wait_idle()
        while self._filling or self._slots.live:
            self._preempt()
        self._backend.sleep()
        self._asleep = True

    def cache_bytes(self) -> int:
        """Held by keys and values."""
        return 0 if self._asleep else self._backend.cache_bytes()

    def wake(self) -> None:
        """Undo `sleep`; a step does so by itself."""
        if self._asleep:
            self._backend.wake()
            self._asleep = False

    def _check(self, request: Request, taken: set[str]) -> None:
        known = request.id in taken or request.id in self._waiting or request.id in self._ended
        problem = refusal(
            request,
            known,
            self._slots.max_length,
            self._weights.vocabulary,
            self._decode is not None,
        )
        if problem:
            raise RolloutError(f"request {request.id!r} cannot be generated: {problem}")

    def _admit(self) -> None:
        slots = self._slots
        free = slots.count - self.running
        if self._waiting and free >= min(
            len(self._waiting), max(1, slots.count // self._backend.admit_share)
        ):
            self._choose(free)
        if self._filling:
            self._fill()

    def _choose(self, free: int) -> None:
        """Take up to `free` sequences from those that wait, as long as there is room; the same contexts come together."""
        # a live sequence with the same context still holds the keys and values of its prefill, unless the weights changed
        live = {
            running.key: running for running in self._slots.live if running.epoch == self._epoch
        }
        fillings: dict[int, PendingPrefill] = {}
        for _ in range(min(free, len(self._waiting))):
            running = next(iter(self._waiting.values()))
            filling, holder = fillings.get(running.key), live.get(running.key)
            source = filling.source if filling else holder
            if not self._backend.room_for(running, source):
                break
            del self._waiting[running.request.id]
            running.epoch, running.arrival = self._epoch, next(self._arrivals)
            if filling:
                filling.copies.append(running)
            elif holder:
                fillings[running.key] = PendingPrefill(holder, [running], new=False, done=0)
            else:
                fillings[running.key] = PendingPrefill(running, [], new=True, done=0)
        self._filling += sorted(fillings.values(), key=lambda filling: -len(filling.source.context))

    def _fill(self) -> None:
        """Prefill, no more at a time than live sequences can wait for, and let those whose context is complete go live."""
        slots, base = self._slots, len(self._slots.live)
        budget = self._backend.prefill_tokens if base else 1 << 62
        pieces = []
        for filling in self._filling:
            if (tokens := min(filling.left, budget)) > 0:
                pieces.append(PrefillChunk(filling.source, filling.done, filling.done + tokens))
                filling.done += tokens
                budget -= tokens
                self._tokens_prefilled += tokens
        if pieces:
            self._backend.prefill(pieces, base)
        complete = [filling for filling in self._filling if filling.left == 0]
        self._filling = [filling for filling in self._filling if filling.left]
        for filling in sorted(complete, key=lambda filling: filling.new, reverse=True):
            if filling.new:
                slots.add(filling.source)
        target = len(slots.live)
        rows = {id(running): row for row, running in enumerate(slots.live)}
        for filling in complete:
            for running in filling.copies:
                slots.add(running)
            if filling.copies:
                self._backend.fork(filling.source, rows[id(filling.source)], filling.copies, target)
                target += len(filling.copies)
        self._backend.place(slots, base)

    def _start(self, finished: Finished) -> bool:
        """Start the next burst, unless all live sequences reach their end with those under way."""
        slots = self._slots
        while n := len(slots.live):
            now, limit = slots.position[:n] + slots.ahead[:n], slots.limit[:n]
            if not (now < limit).any():
                return False
            steps = self._backend.steps(n)
            if self._backend.grow(slots, np.minimum(now + steps, limit)):
                self._flights.append(
                    InFlightBurst(
                        self._backend.decode(slots, steps), steps, list(slots.live), self._version
                    )
                )
                slots.ahead[:n] += steps
                return True
            if self._flights:
                finished += self._land()
            else:
                self._preempt()
        return False

    def _land(self) -> Finished:
        """Read the tokens of the oldest burst under way."""
        flight, slots = self._flights.popleft(), self._slots
        if flight.sequences == slots.live:
            rows = columns = np.arange(len(slots.live))
        else:  # some are gone or have other rows by now
            column = {id(running): index for index, running in enumerate(flight.sequences)}
            rows = np.array(
                [row for row, running in enumerate(slots.live) if id(running) in column], np.int64
            )
            columns = np.array([column[id(slots.live[row])] for row in rows], np.int64)
        slots.ahead[rows] -= flight.steps
        going = slots.position[rows] < slots.limit[rows]
        rows, columns = rows[going], columns[going]
        tokens, logprobs = flight.burst.result()
        ended: dict[int, Finish] = {}
        for step in range(flight.steps):
            if not np.isfinite(logprobs[step, columns]).all():
                raise RolloutError(
                    f"a log-probability is not finite: the weights of version {flight.version} hold inf or nan, or have diverged"
                )
            slots.record(rows, tokens[step, columns], logprobs[step, columns], flight.version)
            self._tokens_sampled += len(rows)
            if stopped := slots.ended(rows, self._decode):
                ended |= stopped
                going = ~np.isin(rows, list(stopped))
                rows, columns = rows[going], columns[going]
        return self._release(ended)

    def _release(self, rows: dict[int, Finish]) -> Finished:
        slots = self._slots
        finished = [
            (slots.live[row].request.id, slots.completion(row, finish))
            for row, finish in rows.items()
        ]
        self._remove(list(rows))
        return finished

    def _remove(self, rows: list[int]) -> None:
        if rows:
            for row in rows:
                self._backend.free(self._slots.live[row])
            self._backend.move(self._slots, self._slots.remove(rows))

    def _preempt(self) -> None:
        """Make the sequence that came last wait again, with what it has: its memory is needed."""
        if self._filling:
            self._unfill(self._filling[-1])
            return
        live = self._slots.live
        row = max(range(len(live)), key=lambda row: live[row].arrival)
        request = live[row].request
        self._requeue(
            Running.of(replace(request, partial=self._slots.completion(row, Finish.INTERRUPT)))
        )
        self._remove([row])

    def _unfill(self, filling: PendingPrefill) -> None:
        self._filling.remove(filling)
        for running in reversed(filling.sequences):
            self._backend.free(running)
            self._requeue(running)

    def _requeue(self, running: Running) -> None:
        self._waiting[running.request.id] = running
        self._waiting.move_to_end(running.request.id, last=False)
