"""Part of a worker that generates: runs an engine step by step between calls of the controller."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol

from torch import Tensor

from paceline.errors import RolloutError
from paceline.remote.device_clock import DISCARDED, SYNC, current_clock, decoding, doing
from paceline.remote.host import BusyClock
from paceline.remote.message import Deferred
from paceline.rollout.engine import EngineStats
from paceline.sync.transport import WeightTarget
from paceline.sync.weights import Weights
from paceline.types import Completion, Request

Finished = list[tuple[str, Completion]]
TrainerWeights = Callable[[], AbstractContextManager[Mapping[str, Tensor]]]
GatheredWeights = Callable[[], AbstractContextManager[Iterator[tuple[str, Tensor]]]]


class SteppedEngine(Protocol):
    """What the native engine and the vLLM adapter have in common; see the former for details."""

    @property
    def slots(self) -> int: ...
    @property
    def kv_used(self) -> float: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def version(self) -> int: ...
    @property
    def tokens_sampled(self) -> int: ...
    @property
    def tokens_prefilled(self) -> int: ...
    @property
    def tokens_reused(self) -> int: ...
    def submit(self, requests: Sequence[Request]) -> None: ...
    def step(self) -> Finished: ...
    def abort(self, ids: Sequence[str]) -> Finished: ...
    def interrupt(self) -> Finished: ...
    def partials(self) -> Finished: ...
    def wait_idle(self) -> None: ...
    def load(
        self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int
    ) -> None: ...
    def set_version(self, version: int) -> None: ...
    def release(self) -> None: ...


class RolloutService:
    """The engine. `weight_target` is the part that the weight transport talks to."""

    activities: ClassVar = {"load_weights": SYNC, "gather_weights": SYNC}

    def __init__(
        self,
        engine: SteppedEngine,
        trainer_weights: TrainerWeights | None = None,
        gather: GatheredWeights | None = None,
    ) -> None:
        """`trainer_weights`: where to copy from if the trainer is in the same worker, but its
        parameters are not the engine's. `gather`: the same if the trainer is a group of ranks."""
        self.weight_target = WeightTarget()
        self._engine = engine
        self._trainer_weights, self._gather = trainer_weights, gather
        self._paused = self._released = False
        self._busy, self._started = BusyClock(), time.perf_counter()
        self._finished: Finished = []  # by a call; sent with the next unit of work

    def work(self) -> Finished | None:
        finished, self._finished = self._finished, []
        blocked = self._paused or self._released or not self.weight_target.intact
        if blocked or not self._engine.has_work:
            return finished or None
        engine = self._engine
        activity = decoding(min(engine.running + engine.waiting, engine.slots), engine.slots)
        sampled = engine.tokens_sampled
        with self._busy, doing(activity) as decoded:
            finished += engine.step()
            decoded.count = engine.tokens_sampled - sampled
        return finished

    def submit(self, requests: Sequence[Request]) -> list[tuple[str, RolloutError]]:
        """Submit requests; return those that the engine rejects, with the reason."""
        rejected = []
        for request in requests:
            try:
                self._engine.submit([request])
            except RolloutError as error:
                rejected.append((request.id, error))
        return rejected

    def abort(self, ids: Sequence[str]) -> None:
        aborted = self._engine.abort(ids)
        self._finished += aborted
        if clock := current_clock():
            clock.count(DISCARDED, sum(len(completion) for _, completion in aborted))

    def interrupt(self) -> None:
        self._finished += self._engine.interrupt()

    def partials(self) -> Finished:
        """Return the tokens so far of all requests, which continue."""
        return self._engine.partials()

    def pause(self) -> None:
        self._paused = True
        self._engine.wait_idle()  # nothing reads the weights from here on

    def resume(self) -> None:
        self._paused = False

    def load_weights(self, weights: Weights) -> Deferred | None:
        if weights.checksum is not None:
            return self.weight_target.load(weights, self._engine.load)
        if self._trainer_weights is None:
            self._engine.set_version(weights.version)
        else:
            with self._trainer_weights() as tensors:
                self._engine.load(tensors, weights.version)
        return None

    def gather_weights(self, version: int) -> None:
        """Load the weights of the trainer, of which this worker is a rank. All ranks call it."""
        assert self._gather is not None, "the trainer is in the same group of ranks"
        with self._gather() as tensors:
            self._engine.load(tensors, version)
        self._released = False

    def release(self) -> None:
        """Free the engine's memory until `gather_weights`. Unfinished completions wait."""
        if not self._released:
            self._released = True
            self._engine.release()

    def stats(self) -> EngineStats:
        engine = self._engine
        return EngineStats(
            engine.version,
            engine.running,
            engine.waiting,
            engine.tokens_sampled,
            self._busy.seconds,
            self._paused,
            engine.slots,
            engine.kv_used,
            time.perf_counter() - self._started,
            engine.tokens_prefilled,
            engine.tokens_reused,
        )
