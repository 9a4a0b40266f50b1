"""Parts of a worker that trains: actor, critic and reference model, called by the controller."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from paceline.model.snapshot import Snapshot
from paceline.remote.device_clock import CHECKPOINT, SWITCHING, TRAINING, doing
from paceline.remote.host import BusyClock
from paceline.sync.transport import WeightSource
from paceline.training.actor import Actor
from paceline.training.critic import Critic
from paceline.training.engine import TrainEngine
from paceline.training.phases import GENERATE, SYNC, TRAIN, Phases
from paceline.training.replay import replay
from paceline.types import Batch, FloatArray


class DeviceTimeShare:
    """The train engine's time on a device that it shares.

    Inside the context its state is on the device; outside it is offloaded to host memory.
    """

    def __init__(self, engine: TrainEngine, offload: bool, phases: Phases | None = None) -> None:
        """`phases`: measures the memory of each phase if the worker alternates with an engine."""
        self._engine, self._offload, self._phases = engine, offload, phases
        self._phase = TRAIN
        self._bytes, self._seconds = 0, 0.0

    def __enter__(self) -> None:
        if self._phases:
            self._phases.enter(self._phase)
        self._place("device")

    def __exit__(self, *_: object) -> None:
        self._place("host")
        if self._phases and self._offload:
            torch.cuda.empty_cache()  # the rollout engine may use another allocator
        if self._phases:  # last: the peak of generation is that without the offloaded state
            self._phases.enter(GENERATE)

    @contextmanager
    def for_step(self) -> Iterator[None]:
        """Hold the device for a part of a train step, which ends with a sync."""
        if self._phases:
            with doing(SWITCHING):
                self._phases.release_engine()
        with self:
            yield

    @contextmanager
    def for_sync(self) -> Iterator[None]:
        """Hold the device while the rollout engine copies weights."""
        self._phase = SYNC
        try:
            with self:
                yield
        finally:
            self._phase = TRAIN

    def _place(self, where: Literal["device", "host"]) -> None:
        if self._offload:
            with doing(SWITCHING):
                moved = self._engine.place(where)
            self._bytes, self._seconds = self._bytes + moved.bytes, self._seconds + moved.seconds

    def metrics(self) -> dict[str, float]:
        """Return what was moved since the last call."""
        found: dict[str, float] = {}
        if self._offload:
            found = {"offload_bytes": float(self._bytes), "offload_s": self._seconds}
        self._bytes, self._seconds = 0, 0.0
        return found


class _Trained:
    """What actor and critic have in common."""

    activities: ClassVar = {
        **dict.fromkeys(("update", "fit", "values", "logprobs"), TRAINING),
        **dict.fromkeys(("save", "snapshot", "load"), CHECKPOINT),
    }

    def __init__(self, engine: TrainEngine, offload: bool, phases: Phases | None) -> None:
        self._engine, self._on_device = engine, DeviceTimeShare(engine, offload, phases)
        self._snapshot = Snapshot()

    def save(self, folder: str) -> None:
        with self._snapshot.taking(beside=False), self._on_device:
            self._engine.save(Path(folder))

    def snapshot(self, folder: str) -> None:
        """Save what the state is now, but return before the files are written."""
        with self._snapshot.taking(), self._on_device:
            self._engine.save(Path(folder))

    def written(self) -> "Future[None]":
        """Reply when the files of the last snapshot are written, or with the error."""
        return self._snapshot.written

    def load(self, folder: str) -> None:
        with self._on_device:
            self._engine.load(Path(folder))


class CriticService(_Trained):
    def __init__(self, critic: Critic, offload: bool = False, phases: Phases | None = None) -> None:
        super().__init__(critic.engine, offload, phases)
        self._critic = critic

    def values(self, batch: Batch) -> FloatArray:
        with self._on_device.for_step():
            return self._critic.values(batch)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        with self._on_device.for_step():
            metrics = self._critic.update(batch, step)
        metrics |= self._on_device.metrics()
        return {f"critic/{name}": value for name, value in metrics.items()}


UNKNOWN_TOKEN = -20.0  # log-prob of a token that the reference model does not have


class RefService:
    """The frozen reference model: a separate engine, or the actor's while `as_reference` holds.

    `vocabulary`: number of its tokens, if that may be smaller than the policy's, which can sample
    from the padding of its vocabulary.
    """

    activities: ClassVar = {"logprobs": TRAINING}

    def __init__(
        self,
        engine: TrainEngine,
        offload: bool = False,
        as_reference: Callable[[], AbstractContextManager[None]] = nullcontext,
        phases: Phases | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self._engine, self._as_reference = engine, as_reference
        self._vocabulary = vocabulary
        self._on_device = DeviceTimeShare(engine, offload, phases)

    def logprobs(self, batch: Batch) -> FloatArray:
        unknown = np.zeros(0, np.bool_)
        if self._vocabulary is not None:
            unknown = batch.tokens >= self._vocabulary
            batch = replace(batch, tokens=np.minimum(batch.tokens, self._vocabulary - 1))
        with self._on_device.for_step(), self._as_reference():
            found = self._engine.logprobs(batch)
        if unknown.any():
            found = np.where(unknown & batch.mask, np.float32(UNKNOWN_TOKEN), found)
        return found


class ActorService(_Trained):
    """The actor. `weight_source` is the part that the weight transport talks to."""

    def __init__(self, actor: Actor, offload: bool = False, phases: Phases | None = None) -> None:
        super().__init__(actor.engine, offload, phases)
        self._actor, self._phases = actor, phases
        self.weight_source = WeightSource(actor.engine.export_weights, self._on_device)

    def logprobs(self, batch: Batch) -> FloatArray:
        """Return log-probs under the current weights, without a train step: [T]."""
        with self._on_device:
            return self._actor.logprobs(batch)

    def update(self, batch: Batch, step: int, kl_coef: float | None = None) -> dict[str, float]:
        return self._step(lambda: self._actor.update(batch, step, kl_coef))

    def fit(self, batch: Batch, step: int) -> dict[str, float]:
        """Make a supervised train step."""
        return self._step(lambda: self._actor.fit(batch, step))

    def replay(self, batch: Batch, step: int, kl_coef: float | None = None) -> dict[str, Any]:
        """Repeat the computation of a step without changing a weight."""
        with self._on_device.for_step():
            return replay(self._actor, batch, step, kl_coef)

    def _step(self, work: Callable[[], dict[str, float]]) -> dict[str, float]:
        busy = BusyClock()
        with busy, self._on_device.for_step():
            metrics = work()
        metrics |= self._on_device.metrics() | {"busy_s": busy.seconds}
        memory = self._phases.metrics() if self._phases else {}
        return {f"train/{name}": value for name, value in metrics.items()} | memory

    @contextmanager
    def gathering(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Provide the weights to the engine of each rank, one full tensor at a time.

        All ranks must consume them together, because each tensor is gathered from all.
        """
        with self._on_device.for_sync():
            yield self._engine.export_weights()

    @contextmanager
    def copying(
        self, weights: Callable[[], Mapping[str, Tensor]]
    ) -> Iterator[Mapping[str, Tensor]]:
        """Provide the weights to the engine in the same worker, which copies them."""
        with self._on_device.for_sync():
            yield weights()
