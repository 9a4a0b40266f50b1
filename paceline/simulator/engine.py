"""Simulated rollout engine: continuous batching that costs time and makes no tokens.

It advances from one event (a completion, an arrival, new weights) to the next, not token by token.
A token of a simulated prompt or completion stands for many: its value is how many. A completion has
one such token per policy version, so a group of long completions costs no memory.

Waits for: the virtual clock. The real client, router and rollouter talk to it.
"""

import asyncio
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from paceline.errors import WorkerDied
from paceline.notifier import Notifier
from paceline.remote.message import Call, Event, Reply
from paceline.remote.worker import Worker
from paceline.rollout.engine import EngineStats
from paceline.simulator.costs import CostModel
from paceline.simulator.lengths import Distribution
from paceline.sync.weights import Weights
from paceline.types import Completion, Finish, Request, Role

Finished = list[tuple[str, Completion]]


@dataclass(slots=True)
class BusySeconds:
    """Seconds that an engine computed, by what it did."""

    decode: float = 0.0
    prefill: float = 0.0
    load: float = 0.0

    @property
    def total(self) -> float:
        return self.decode + self.prefill + self.load


@dataclass(slots=True, eq=False)
class Running:
    request: Request
    begin: int  # decode step of the engine before its first token
    end: int  # decode step of its last token
    context: int  # tokens in the KV cache before the first token

    def __lt__(self, other: "Running") -> bool:
        return self.end < other.end


class SimulatedEngine:
    def __init__(
        self,
        costs: CostModel,
        lengths: Distribution,
        slots: int,
        emit: Callable[[Finished], None],
        version: int = 0,
    ) -> None:
        self.busy = BusySeconds()
        self.changed = Notifier()  # of `generating`
        self._costs, self._lengths, self._slots, self._emit = costs, lengths, slots, emit
        self._live: list[Running] = []  # heap, by their ends
        self._waiting: deque[Request] = deque()
        self._prompts: Counter[str] = Counter()  # groups whose prompt is in the KV cache
        self._step = 0  # decode steps until `_at`
        self._context = 0  # tokens in the KV cache at `_at`
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()  # until then everything is computed; may be in the future
        self._slowdown = 1.0
        self._paused = self._stopped = False
        self._changes, self._versions = [0], [version]  # first step of each version
        self._tokens = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def generating(self) -> bool:
        return bool(self._live) and not self._paused

    # --- calls of the client ---

    def submit(self, requests: Sequence[Request]) -> list[tuple[str, Exception]]:
        self._advance()
        self._waiting.extend(requests)
        self._continue()
        return []

    def abort(self, ids: Sequence[str]) -> None:
        self._advance()
        self._emit(self._take_out(set(ids), Finish.ABORT))
        self._continue()

    def interrupt(self) -> asyncio.Future[None]:
        self._advance()
        everything = {running.request.id for running in self._live}
        everything |= {request.id for request in self._waiting}
        self._cancel_timer()
        return self._at_boundary(
            lambda: self._emit(self._take_out(everything, Finish.INTERRUPT)), then_continue=True
        )

    def pause(self) -> asyncio.Future[None]:
        self._advance()
        self._paused = True
        self._cancel_timer()
        self.changed.notify_all()
        return self._at_boundary()

    def resume(self) -> None:
        self._advance()
        self._paused = False
        self._continue()

    def load_weights(self, weights: Weights) -> asyncio.Future[None]:
        self._advance()
        self._at += self._costs.load_s
        self.busy.load += self._costs.load_s
        self._changes.append(self._step)
        self._versions.append(weights.version)
        self._prompts.clear()  # the cache of older weights is not shared with new sequences
        self._continue()
        return self._at_boundary()

    def stats(self) -> EngineStats:
        return EngineStats(
            self._versions[-1],
            len(self._live),
            len(self._waiting),
            self._tokens,
            self.busy.total,
            self._paused,
            self._slots,
        )

    # --- from outside ---

    def set_slowdown(self, factor: float) -> None:
        """Change the speed: a neighbor on the device starts or ends work."""
        self._advance()
        self._slowdown = factor
        self._continue()

    def stop(self) -> None:
        self._stopped = True
        self._cancel_timer()

    # --- time ---

    def _advance(self) -> None:
        """Account for the decode steps that have started by now."""
        now = self._loop.time()
        if not self.generating:
            self._at = max(self._at, now)
        elif (elapsed := now - self._at) > 0:
            steps = self._costs.steps_within(
                elapsed / self._slowdown, len(self._live), self._context
            )
            self._decode(min(steps, self._live[0].end - self._step))

    def _decode(self, steps: int) -> None:
        sequences = len(self._live)
        seconds = self._slowdown * self._costs.burst_s(steps, sequences, self._context)
        self._at += seconds
        self.busy.decode += seconds
        self._step += steps
        self._context += steps * sequences
        self._tokens += steps * sequences

    def _continue(self) -> None:
        """Admit waiting sequences and set the timer to the next completion."""
        if self._stopped or self._paused:
            return
        self._cancel_timer()
        self._admit()
        if self._live:
            steps = self._live[0].end - self._step
            seconds = self._costs.burst_s(steps, len(self._live), self._context)
            self._timer = self._loop.call_at(
                self._at + self._slowdown * seconds, self._complete, steps
            )
        self.changed.notify_all()

    def _complete(self, steps: int) -> None:
        self._timer = None
        self._decode(steps)
        finished = []
        while self._live and self._live[0].end <= self._step:
            running = heappop(self._live)
            finished.append((running.request.id, self._release(running, Finish.STOP)))
        self._continue()
        self._emit(finished)

    def _at_boundary(
        self, act: Callable[[], None] | None = None, then_continue: bool = False
    ) -> asyncio.Future[None]:
        """Return a future that is done when the current step or load has ended."""
        done: asyncio.Future[None] = self._loop.create_future()

        def reach() -> None:
            if self._stopped or done.done():
                return
            if act:
                act()
            if then_continue:
                self._continue()
            done.set_result(None)

        self._loop.call_at(self._at, reach)
        return done

    def _cancel_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    # --- sequences ---

    def _admit(self) -> None:
        """Prefill waiting sequences that have a slot. Equal prompts are prefilled once."""
        tokens, before = 0, len(self._live)
        while self._waiting and len(self._live) < self._slots:
            request = self._waiting.popleft()
            made = int(request.partial.tokens.sum()) if request.partial else 0
            context, prompt = sum(request.prompt) + made, _prompt(request)
            if made or not self._prompts[prompt]:
                tokens += context
            self._prompts[prompt] += 1
            length = max(made + 1, int(self._lengths[request.seed]))
            end = self._step + length - made
            heappush(self._live, Running(request, self._step, end, context))
            self._context += context
        costs, started = self._costs, len(self._live) - before
        if started:
            work = costs.prefill_token_s * tokens + costs.prefill_sequence_s * started
            self._at += self._slowdown * work
            self.busy.prefill += self._slowdown * work

    def _release(self, running: Running, finish: Finish) -> Completion:
        """Return the completion of a sequence that is no longer live."""
        self._context -= running.context + self._step - running.begin
        prompt = _prompt(running.request)
        if self._prompts[prompt] > 1:
            self._prompts[prompt] -= 1
        else:
            del self._prompts[prompt]
        return self._completion(running.request, running.begin, self._step, finish)

    def _take_out(self, ids: set[str], finish: Finish) -> Finished:
        finished = []
        for running in [running for running in self._live if running.request.id in ids]:
            self._live.remove(running)
            finished.append((running.request.id, self._release(running, finish)))
        heapify(self._live)
        for request in [request for request in self._waiting if request.id in ids]:
            self._waiting.remove(request)
            completion = self._completion(request, self._step, self._step, finish)
            finished.append((request.id, completion))
        return finished

    def _completion(self, request: Request, begin: int, end: int, finish: Finish) -> Completion:
        counts = list(request.partial.tokens) if request.partial else []
        versions = list(request.partial.versions) if request.partial else []
        place = bisect_right(self._changes, begin) - 1
        while begin < end:
            following = self._changes[place + 1] if place + 1 < len(self._changes) else end
            until = min(end, following)
            if until > begin:
                counts.append(until - begin)
                versions.append(self._versions[place])
            begin, place = until, place + 1
        return Completion(
            np.array(counts, np.int32),
            np.zeros(len(counts), np.float32),
            np.array(versions, np.int32),
            finish,
        )


def _prompt(request: Request) -> str:
    """Return what requests with the same prompt have in common."""
    group, _, rest = request.id.partition(".")
    return group if len(request.prompt) == 1 else f"{group}.{rest.partition('.')[0]}"


class SimulatedWorker(Worker):
    """Worker that hosts a simulated engine: calls reach it at once."""

    def __init__(
        self,
        name: str,
        costs: CostModel,
        lengths: Distribution,
        slots: int,
    ) -> None:
        super().__init__(name)
        self.engine = SimulatedEngine(costs, lengths, slots, self._finished)

    def send(self, message: Call) -> None:
        outcome = getattr(self.engine, message.method)(*message.args)
        if isinstance(outcome, asyncio.Future):
            outcome.add_done_callback(lambda _: self._reply(message.id))
        else:
            self._receive(Reply(message.id, outcome))

    def die(self) -> None:
        self.engine.stop()
        self.fence(WorkerDied(f"worker {self.name!r} died"))

    async def close(self) -> None:
        self.engine.stop()

    def _finished(self, finished: Finished) -> None:
        if finished and not self.died.done():
            self._receive(Event(Role.ROLLOUT, finished))

    def _reply(self, call_id: int) -> None:
        if not self.died.done():
            self._receive(Reply(call_id))
