"""The worker's end of training: an Actor or Critic, plus what the weight transport needs of it."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from paceline.errors import SyncError
from paceline.remote.group import is_first_rank
from paceline.remote.host import BusyClock
from paceline.sync.block import Layout, WeightBlock, layout_of
from paceline.sync.collective import CollectiveSource
from paceline.sync.ipc import Handle, handle_of, in_type, this_gpu
from paceline.sync.stream import Address, StreamSource
from paceline.train.actor import Actor
from paceline.train.critic import Critic
from paceline.train.engine import TrainEngine
from paceline.train.phases import GENERATE, HAND_OVER, TRAIN, Phases
from paceline.types import Batch, FloatArray


class DeviceTimeShare:
    """An engine's turns on a device it shares with others: inside it is there, in between it waits in host memory."""

    def __init__(self, engine: TrainEngine, offload: bool, phases: Phases | None = None) -> None:
        """`phases`: where the worker's engine takes turns with the rollout engine, so that what each needs is measured."""
        self._engine, self._offload, self._phases = engine, offload, phases
        self._phase = TRAIN
        self._bytes, self._seconds = 0, 0.0

    def __enter__(self) -> None:
        if self._phases:
            self._phases.enter(self._phase)
        self._place("device")

    def __exit__(self, *_: object) -> None:
        if self._phases:
            self._phases.enter(GENERATE)
        self._place("host")
        if self._phases and self._offload:
            torch.cuda.empty_cache()  # the rollout engine may have another allocator

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """A turn in which the rollout engine copies weights."""
        self._phase = HAND_OVER
        try:
            with self:
                yield
        finally:
            self._phase = TRAIN

    def _place(self, where: Literal["device", "host"]) -> None:
        if self._offload:
            moved = self._engine.place(where)
            self._bytes, self._seconds = self._bytes + moved.bytes, self._seconds + moved.seconds

    def metrics(self) -> dict[str, float]:
        """What moved since this was last asked."""
        found = (
            {"offload_bytes": float(self._bytes), "offload_s": self._seconds}
            if self._offload
            else {}
        )
        self._bytes, self._seconds = 0, 0.0
        return found


class CriticService:
    def __init__(self, critic: Critic, offload: bool = False, phases: Phases | None = None) -> None:
        self._critic, self._on_device = critic, DeviceTimeShare(critic.engine, offload, phases)

    def values(self, batch: Batch) -> FloatArray:
        with self._on_device:
            return self._critic.values(batch)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        with self._on_device:
            metrics = self._critic.update(batch, step)
        return {
            f"critic/{name}": value for name, value in (metrics | self._on_device.metrics()).items()
        }

    def save(self, folder: str) -> None:
        with self._on_device:
            self._critic.engine.save(Path(folder))

    def load(self, folder: str) -> None:
        with self._on_device:
            self._critic.engine.load(Path(folder))


class RefService:
    """The frozen model the policy is kept close to: one of its own, or the actor's while `as_reference` holds."""

    def __init__(
        self,
        engine: TrainEngine,
        offload: bool = False,
        as_reference: Callable[[], AbstractContextManager[None]] = nullcontext,
        phases: Phases | None = None,
    ) -> None:
        self._engine, self._on_device, self._as_reference = (
            engine,
            DeviceTimeShare(engine, offload, phases),
            as_reference,
        )

    def logprobs(self, batch: Batch) -> FloatArray:
        with self._on_device, self._as_reference():
            return self._engine.logprobs(batch)


class ActorService:
    def __init__(self, actor: Actor, offload: bool = False, phases: Phases | None = None) -> None:
        self._actor, self._on_device, self._phases = (
            actor,
            DeviceTimeShare(actor.engine, offload, phases),
            phases,
        )
        self._source: StreamSource | None = None
        self._write: Callable[[Iterator[tuple[str, Tensor]], int], int] | None = None

    def update(self, batch: Batch, step: int, kl_coef: float | None = None) -> dict[str, float]:
        busy = BusyClock()
        with busy, self._on_device:
            metrics = self._actor.update(batch, step, kl_coef)
        memory = self._phases.metrics() if self._phases else {}
        named = {
            f"train/{name}": value for name, value in (metrics | self._on_device.metrics()).items()
        }
        return named | memory | {"train/busy_s": busy.seconds}

    def save(self, folder: str) -> None:
        with self._on_device:
            self._actor.engine.save(Path(folder))

    def load(self, folder: str) -> None:
        with self._on_device:
            self._actor.engine.load(Path(folder))

    @contextmanager
    def weights_at_hand(
        self, weights: Callable[[], Mapping[str, Tensor]]
    ) -> Iterator[Mapping[str, Tensor]]:
        """The trainer's weights, for the engine in the same worker to copy."""
        with self._on_device.handing_over():
            yield weights()

    def weights_layout(self) -> Layout:
        with self._on_device:
            return layout_of(self._actor.engine.export_weights())

    def attach_weights(self, path: str, layout: Layout) -> None:
        """Publish into shared memory."""
        if is_first_rank():
            block = WeightBlock(path, layout)
            self._write = lambda weights, _: block.write(weights)

    def share_weights(self, dtype: str) -> tuple[Layout, Handle]:
        """Publish into memory of this GPU, which others there map."""
        layout = in_type(self.weights_layout(), dtype)
        if not is_first_rank():
            return layout, ()
        block = WeightBlock(None, layout, "cuda")
        self._write = lambda weights, _: block.write(weights)
        return layout, handle_of(block.bytes)

    def gpu(self) -> str | None:
        return this_gpu()

    def stream_weights(self, kind: str, layout: Layout, host: str, token: bytes) -> int:
        """Publish to other machines: a "stream" or also a "collective"; the port where to fetch."""
        if not is_first_rank():
            return 0
        self._source = (
            CollectiveSource(layout, host, token)
            if kind == "collective"
            else StreamSource(layout, host, token)
        )
        self._write = self._source.write
        return self._source.server.port

    def broadcast_store(self) -> Address | None:
        """Where a circle for broadcasts meets."""
        return self._source.store if isinstance(self._source, CollectiveSource) else None

    def join_broadcast_group(self, epoch: int, size: int) -> None:
        if isinstance(self._source, CollectiveSource):
            self._source.join(epoch, size)

    def publish_weights(self, version: int) -> int:
        """All ranks gather the weights, the first writes them; its checksum."""
        with self._on_device:
            weights = self._actor.engine.export_weights()
            if not is_first_rank():
                deque(weights, maxlen=0)
                return 0
            if self._write is None:
                raise SyncError(
                    f"version {version} cannot be published before a transport is attached"
                )
            return self._write(weights, version)
