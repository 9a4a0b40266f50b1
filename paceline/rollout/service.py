"""The worker's end of an engine: drives a NativeEngine step by step between calls."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from paceline.errors import RolloutError, SyncError
from paceline.place.host import BusyClock
from paceline.rollout.engine import EngineStats
from paceline.rollout.native.engine import NativeEngine
from paceline.sync.transport import Layout, WeightBlock
from paceline.sync.weights import Weights
from paceline.types import Completion, Request

Finished = list[tuple[str, Completion]]


class RolloutService:
    def __init__(self, engine: NativeEngine, trainer_weights: Callable[[], Mapping[str, Tensor]] | None = None) -> None:
        """`trainer_weights`: where to copy from when the trainer is in the same worker but has its weights in another form."""
        self._engine = engine
        self._trainer_weights = trainer_weights
        self._held = False
        self._block: WeightBlock | None = None
        self._busy = BusyClock()
        self._leaving: Finished = []  # ended by a call; sent with the next unit of work

    def work(self) -> Finished | None:
        leaving, self._leaving = self._leaving, []
        if self._held or not self._engine.has_work:
            return leaving or None
        with self._busy:
            return leaving + self._engine.step()

    def submit(self, requests: Sequence[Request]) -> list[tuple[str, RolloutError]]:
        """Returns the requests the engine cannot take, so that one of them does not spoil the rest."""
        refused = []
        for request in requests:
            try:
                self._engine.submit([request])
            except RolloutError as error:
                refused.append((request.id, error))
        return refused

    def abort(self, ids: Sequence[str]) -> None:
        self._leaving += self._engine.abort(ids)

    def interrupt(self) -> None:
        self._leaving += self._engine.interrupt()

    def hold(self) -> None:
        self._held = True
        self._engine.settle()  # nothing reads the weights from here on

    def go_on(self) -> None:
        self._held = False

    def attach_weights(self, path: str, layout: Layout) -> None:
        self._block = WeightBlock(path, layout)

    def load_weights(self, weights: Weights) -> None:
        if weights.checksum is None:
            if self._trainer_weights is None:
                self._engine.set_version(weights.version)
            else:
                self._engine.load(self._trainer_weights(), weights.version)
            return
        if self._block is None:
            raise SyncError(f"weights of version {weights.version} were announced before the shared memory was attached")
        self._block.verify(weights)
        self._engine.load(self._block.tensors.items(), weights.version)

    def stats(self) -> EngineStats:
        engine = self._engine
        return EngineStats(engine.version, engine.running, engine.waiting, engine.tokens_sampled, self._busy.seconds, self._held)
