"""The worker's end of training: an Actor or Critic, plus what the weight transport needs of it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from paceline.errors import SyncError
from paceline.place.host import BusyClock
from paceline.sync.transport import Layout, WeightBlock, layout_of
from paceline.train.actor import Actor
from paceline.train.critic import Critic
from paceline.train.engine import TrainEngine
from paceline.types import Batch, FloatArray


class CriticService:
    def __init__(self, critic: Critic) -> None:
        self._critic = critic

    def values(self, batch: Batch) -> FloatArray:
        return self._critic.values(batch)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        return {f"critic/{name}": value for name, value in self._critic.update(batch, step).items()}

    def save(self, folder: str) -> None:
        self._critic.engine.save(Path(folder))

    def load(self, folder: str) -> None:
        self._critic.engine.load(Path(folder))


class RefService:
    """The frozen model the policy is kept close to: one of its own, or the actor's while `as_reference` holds."""

    def __init__(self, engine: TrainEngine, as_reference: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._engine, self._as_reference = engine, as_reference

    def logprobs(self, batch: Batch) -> FloatArray:
        with self._as_reference():
            return self._engine.logprobs(batch)


class ActorService:
    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._block: WeightBlock | None = None

    def update(self, batch: Batch, step: int, kl_coef: float | None = None) -> dict[str, float]:
        busy = BusyClock()
        with busy:
            metrics = self._actor.update(batch, step, kl_coef)
        return {f"train/{name}": value for name, value in metrics.items()} | {"train/busy_s": busy.seconds}

    def save(self, folder: str) -> None:
        self._actor.engine.save(Path(folder))

    def load(self, folder: str) -> None:
        self._actor.engine.load(Path(folder))

    def weights_layout(self) -> Layout:
        return layout_of(self._actor.engine.export_weights())

    def attach_weights(self, path: str, layout: Layout) -> None:
        self._block = WeightBlock(path, layout)

    def publish_weights(self, version: int) -> int:
        if self._block is None:
            raise SyncError(f"version {version} cannot be published before the shared memory is attached")
        return self._block.write(self._actor.engine.export_weights())
