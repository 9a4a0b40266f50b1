"""What every weight transport has: a source in the trainer's worker, a target in the engine's
worker.

A transport is one class for the controller and two ends, all in the same module. The workers hold a
`WeightSource` and a `WeightTarget`; the transport opens its ends in them and calls the ends'
methods.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch

from paceline.errors import SyncError
from paceline.remote.device_clock import SYNC
from paceline.remote.group import is_first_rank
from paceline.remote.message import Deferred
from paceline.remote.worker import Worker
from paceline.sync.block import Layout, Tensors, layout_of
from paceline.sync.weights import Weights
from paceline.types import Role

SOURCE, TARGET = "weight_source", "weight_target"  # names of the two parts in their workers

Load = Callable[[Tensors, int], None]  # an engine's method: copy these tensors, of this version


class SourceEnd(Protocol):
    """The trainer's end of a transport."""

    address: Any  # what targets need to connect

    def write(self, tensors: Tensors, version: int) -> int:
        """Publish all tensors and return their checksum."""
        ...


class TargetEnd(Protocol):
    """An engine's end of a transport."""

    address: Any  # what other engines need to fetch from this one
    intact: bool  # False while the engine has a mix of two versions

    def load(self, weights: Weights, into: Load) -> Deferred | None:
        """Verify the published weights and load them into the engine."""
        ...


class _Part:
    """What source and target have in common: the end of a transport, and calls of its methods."""

    activities: ClassVar = dict.fromkeys(("layout", "open", "publish", "run"), SYNC)
    _end: Any = None

    def gpu(self) -> str | None:
        return this_gpu()

    def run(self, method: Callable[..., Any], *args: Any) -> Any:
        return method(self._end, *args) if is_first_rank() else None


class WeightSource(_Part):
    """The part of a trainer's worker that publishes weights. All ranks gather; rank 0 writes."""

    def __init__(
        self,
        export: Callable[[], Iterator[tuple[str, torch.Tensor]]],
        on_device: AbstractContextManager[None] | None = None,
    ) -> None:
        """`on_device`: held while weights are exported, if the trainer shares its device."""
        self._export, self._on_device = export, on_device or nullcontext()

    def layout(self) -> Layout:
        with self._on_device:
            return layout_of(self._export())

    def open(self, end: Callable[..., SourceEnd], *args: Any) -> Any:
        """Create the end of a transport on rank 0 and return its address."""
        if not is_first_rank():
            return None
        self._end = end(*args)
        return self._end.address

    def publish(self, version: int) -> int:
        """Gather the weights on all ranks, write them on rank 0 and return the checksum."""
        with self._on_device:
            weights = self._export()
            if not is_first_rank():
                for _ in weights:
                    pass
                return 0
            if self._end is None:
                raise SyncError(f"version {version} was published before a transport was opened")
            return self._end.write(weights, version)


class WeightTarget(_Part):
    """The part of an engine's worker that receives weights."""

    @property
    def intact(self) -> bool:
        return self._end is None or bool(self._end.intact)

    def open(self, end: Callable[..., TargetEnd], *args: Any) -> Any:
        """Create the end of a transport, once, and return its address."""
        if self._end is None:
            self._end = end(*args)
        return self._end.address

    def load(self, weights: Weights, into: Load) -> Deferred | None:
        if self._end is None:
            raise SyncError(
                f"version {weights.version} was announced before the engine was attached"
            )
        return self._end.load(weights, into)


class InPlace:
    """No transfer: the engine is in the trainer's worker and reads its parameters."""

    async def publish(self, version: int) -> Weights:
        return Weights(version)

    async def attach(self, engine: Worker) -> None:
        """Do nothing: the engine has the weights already."""


class Gather:
    """Engines in the ranks of the trainer: all ranks gather each tensor and copy it."""

    def __init__(self, trainer: Worker) -> None:
        self._trainer = trainer

    async def publish(self, version: int) -> Weights:
        await self._trainer.call(Role.ROLLOUT, "gather_weights", version)
        return Weights(version)

    async def attach(self, engine: Worker) -> None:
        """Do nothing: an engine in a rank of the trainer neither joins later nor recovers."""


async def publish(trainer: Worker, version: int) -> Weights:
    """Have the trainer's source publish a version."""
    checksum: int = await trainer.call(SOURCE, "publish", version)
    return Weights(version, checksum)


def this_gpu() -> str | None:
    """Return the UUID of the GPU of this process, or None."""
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
