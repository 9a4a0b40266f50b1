"""The worker's end of an engine: drives it step by step between calls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from paceline.errors import RolloutError, SyncError
from paceline.remote.host import BusyClock
from paceline.remote.message import Deferred
from paceline.rollout.engine import EngineStats
from paceline.sync.block import Layout, WeightBlock
from paceline.sync.collective import CollectiveReceiver
from paceline.sync.ipc import Handle, mapped, this_gpu
from paceline.sync.stream import Address, StreamReceiver
from paceline.sync.weights import Weights
from paceline.types import Completion, Request

Finished = list[tuple[str, Completion]]
TrainerWeights = Callable[[], AbstractContextManager[Mapping[str, Tensor]]]


class SteppedEngine(Protocol):
    """What the native engine and vLLM's adapter have in common; see the former for what each part means."""

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
    def submit(self, requests: Sequence[Request]) -> None: ...
    def step(self) -> Finished: ...
    def abort(self, ids: Sequence[str]) -> Finished: ...
    def interrupt(self) -> Finished: ...
    def wait_idle(self) -> None: ...
    def load(
        self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int
    ) -> None: ...
    def set_version(self, version: int) -> None: ...


class RolloutService:
    def __init__(
        self, engine: SteppedEngine, trainer_weights: TrainerWeights | None = None
    ) -> None:
        """`trainer_weights`: where to copy from when the trainer is in the same worker but has its weights in another form."""
        self._engine = engine
        self._trainer_weights = trainer_weights
        self._held = False
        self._whole = True  # else its weights are partly of one version and partly of another, and it waits for better ones
        self._block: WeightBlock | None = None
        self._receiver: StreamReceiver | None = None
        self._busy = BusyClock()
        self._leaving: Finished = []  # ended by a call; sent with the next unit of work

    def work(self) -> Finished | None:
        leaving, self._leaving = self._leaving, []
        if self._held or not self._whole or not self._engine.has_work:
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

    def pause(self) -> None:
        self._held = True
        self._engine.wait_idle()  # nothing reads the weights from here on

    def resume(self) -> None:
        self._held = False

    def attach_weights(self, path: str, layout: Layout) -> None:
        """Load from shared memory."""
        self._block = WeightBlock(path, layout)

    def map_weights(self, handle: Handle, layout: Layout) -> None:
        """Load from memory of this GPU that the trainer shares."""
        if self._block is None:
            self._block = WeightBlock(None, layout, over=mapped(handle))

    def gpu(self) -> str | None:
        return this_gpu()

    def stream_weights(
        self, kind: str, layout: Layout, host: str, token: bytes, sources: Sequence[Address]
    ) -> int:
        """Load from another machine, by "stream" or also by "collective"; the port where others can fetch what this one has."""
        if self._receiver is None:
            self._receiver = (CollectiveReceiver if kind == "collective" else StreamReceiver)(
                layout, host, token
            )
        self._receiver.sources = sources
        return self._receiver.server.port

    def fetch_weights(self, version: int) -> None:
        """Begin to receive what `load_weights` will be told to load."""
        assert self._receiver
        self._receiver.fetch(version)

    def join_broadcast_group(self, store: Address, epoch: int, rank: int, size: int) -> None:
        assert isinstance(self._receiver, CollectiveReceiver)
        self._receiver.join(store, epoch, rank, size)

    def receive_weights(self, version: int) -> Deferred:
        """Take part in a broadcast; whether all of it came that way."""
        receiver = self._receiver
        assert isinstance(receiver, CollectiveReceiver)
        receiver.receive(version)
        return Deferred(lambda: receiver.done(version), lambda: receiver.in_broadcast_group)

    def load_weights(self, weights: Weights) -> Deferred | None:
        if weights.checksum is None:
            if self._trainer_weights is None:
                self._engine.set_version(weights.version)
            else:
                with self._trainer_weights() as tensors:
                    self._engine.load(tensors, weights.version)
            return None
        if (receiver := self._receiver) is not None:
            receiver.fetch(weights.version)
            return Deferred(
                lambda: receiver.done(weights.version),
                lambda: self._engine.load(receiver.tensors(weights).items(), weights.version),
            )
        if self._block is None:
            raise SyncError(
                f"weights of version {weights.version} were announced before the shared memory was attached"
            )
        self._block.verify(weights)
        self._whole = False
        self._engine.load(self._block.tensors.items(), weights.version)
        self._block.verify(
            weights
        )  # nobody waits for a late engine: the trainer may have begun to write the next version
        self._whole = True
        return None

    def stats(self) -> EngineStats:
        engine = self._engine
        return EngineStats(
            engine.version,
            engine.running,
            engine.waiting,
            engine.tokens_sampled,
            self._busy.seconds,
            self._held,
            engine.slots,
            engine.kv_used,
        )
