"""The worker's end of training: an Actor or Critic, plus what the weight transport needs of it."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

from paceline.errors import SyncError
from paceline.place.group import is_first_rank
from paceline.place.host import BusyClock
from paceline.sync.transport import Layout, WeightBlock, layout_of
from paceline.train.actor import Actor
from paceline.train.critic import Critic
from paceline.train.engine import TrainEngine
from paceline.types import Batch, FloatArray


class Turns:
    """An engine's turns on a device it shares with others: inside it is there, in between it waits in host memory."""

    def __init__(self, engine: TrainEngine, offload: bool) -> None:
        self._engine, self._offload = engine, offload
        self._bytes, self._seconds = 0, 0.0

    def __enter__(self) -> None:
        self._place("device")

    def __exit__(self, *_: object) -> None:
        self._place("host")

    def _place(self, where: Literal["device", "host"]) -> None:
        if self._offload:
            moved = self._engine.place(where)
            self._bytes, self._seconds = self._bytes + moved.bytes, self._seconds + moved.seconds

    def metrics(self) -> dict[str, float]:
        """What moved since this was last asked."""
        found = {"offload_bytes": float(self._bytes), "offload_s": self._seconds} if self._offload else {}
        self._bytes, self._seconds = 0, 0.0
        return found


class CriticService:
    def __init__(self, critic: Critic, offload: bool = False) -> None:
        self._critic, self._turn = critic, Turns(critic.engine, offload)

    def values(self, batch: Batch) -> FloatArray:
        with self._turn:
            return self._critic.values(batch)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        with self._turn:
            metrics = self._critic.update(batch, step)
        return {f"critic/{name}": value for name, value in (metrics | self._turn.metrics()).items()}

    def save(self, folder: str) -> None:
        with self._turn:
            self._critic.engine.save(Path(folder))

    def load(self, folder: str) -> None:
        with self._turn:
            self._critic.engine.load(Path(folder))


class RefService:
    """The frozen model the policy is kept close to: one of its own, or the actor's while `as_reference` holds."""

    def __init__(
        self, engine: TrainEngine, offload: bool = False, as_reference: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._engine, self._turn, self._as_reference = engine, Turns(engine, offload), as_reference

    def logprobs(self, batch: Batch) -> FloatArray:
        with self._turn, self._as_reference():
            return self._engine.logprobs(batch)


class ActorService:
    def __init__(self, actor: Actor, offload: bool = False) -> None:
        self._actor, self._turn = actor, Turns(actor.engine, offload)
        self._block: WeightBlock | None = None

    def update(self, batch: Batch, step: int, kl_coef: float | None = None) -> dict[str, float]:
        busy = BusyClock()
        with busy, self._turn:
            metrics = self._actor.update(batch, step, kl_coef)
        return {f"train/{name}": value for name, value in (metrics | self._turn.metrics()).items()} | {"train/busy_s": busy.seconds}

    def save(self, folder: str) -> None:
        with self._turn:
            self._actor.engine.save(Path(folder))

    def load(self, folder: str) -> None:
        with self._turn:
            self._actor.engine.load(Path(folder))

    def weights_layout(self) -> Layout:
        with self._turn:
            return layout_of(self._actor.engine.export_weights())

    def attach_weights(self, path: str, layout: Layout) -> None:
        if is_first_rank():
            self._block = WeightBlock(path, layout)

    def publish_weights(self, version: int) -> int:
        """All ranks gather the weights, the first writes them; its checksum."""
        with self._turn:
            weights = self._actor.engine.export_weights()
            if not is_first_rank():
                deque(weights, maxlen=0)
                return 0
            if self._block is None:
                raise SyncError(f"version {version} cannot be published before the shared memory is attached")
            return self._block.write(weights)
