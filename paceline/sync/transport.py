"""What every weight transport has: a source in the trainer's worker, a target in the engine's
worker.

A transport is one class for the controller and two ends, all in the same module. The workers hold a
`WeightSource` and a `WeightTarget`; the transport opens its ends in them and calls the ends'
methods.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import SyncError
from paceline.remote.group import is_first_rank
from paceline.remote.message import Deferred
from paceline.remote.worker import Worker
from paceline.sync.block import Layout, layout_of
from paceline.sync.weights import Weights

if TYPE_CHECKING:
    import torch

    Tensors = Iterable[tuple[str, torch.Tensor]]

SOURCE, TARGET = "weight_source", "weight_target"  # names of the two parts in their workers

Load = Callable[["Tensors", int], None]  # an engine's method: copy these tensors, of this version


class WeightTransport(Protocol):
    """The controller's view of a transport."""

    async def publish(self, version: int) -> Weights:
        """Make the trainer's weights available and return what engines need to load them."""
        ...

    async def attach(self, engine: Worker) -> None:
        """Prepare an engine that joins later or has recovered to load what is published."""
        ...


class SourceEnd(Protocol):
    """The trainer's end of a transport."""

    @property
    def address(self) -> Any:
        """What targets need to connect."""
        ...

    def write(self, tensors: "Tensors", version: int) -> int:
        """Publish all tensors and return their checksum."""
        ...


class TargetEnd(Protocol):
    """An engine's end of a transport."""

    intact: bool  # False while the engine has a mix of two versions

    @property
    def address(self) -> Any:
        """What other engines need to fetch from this one."""
        ...

    def load(self, weights: Weights, into: Load) -> Deferred | None:
        """Verify the published weights and load them into the engine."""
        ...


class WeightSource:
    """The part of a trainer's worker that publishes weights. All ranks gather; rank 0 writes."""

    def __init__(
        self,
        export: Callable[[], Iterator[tuple[str, "torch.Tensor"]]],
        on_device: AbstractContextManager[None] | None = None,
    ) -> None:
        """`on_device`: held while weights are exported, if the trainer shares its device."""
        self._export, self._on_device = export, on_device or nullcontext()
        self._end: SourceEnd | None = None

    def layout(self) -> Layout:
        with self._on_device:
            return layout_of(self._export())

    def gpu(self) -> str | None:
        return this_gpu()

    def open(self, end: Callable[..., SourceEnd], *args: Any) -> Any:
        """Create the end of a transport on rank 0 and return its address."""
        if not is_first_rank():
            return None
        self._end = end(*args)
        return self._end.address

    def run(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the open end."""
        return method(self._end, *args) if is_first_rank() else None

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


class WeightTarget:
    """The part of an engine's worker that receives weights."""

    def __init__(self) -> None:
        self._end: TargetEnd | None = None

    @property
    def intact(self) -> bool:
        return self._end is None or self._end.intact

    def gpu(self) -> str | None:
        return this_gpu()

    def open(self, end: Callable[..., TargetEnd], *args: Any) -> Any:
        """Create the end of a transport, once, and return its address."""
        if self._end is None:
            self._end = end(*args)
        return self._end.address

    def run(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the open end."""
        return method(self._end, *args)

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


async def publish(trainer: Worker, version: int) -> Weights:
    """Have the trainer's source publish a version."""
    checksum: int = await trainer.call(SOURCE, "publish", version)
    return Weights(version, checksum)


def this_gpu() -> str | None:
    """Return the UUID of the GPU of this process, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
