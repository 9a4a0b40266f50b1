"""A published version of the weights, and the protocol of what brings it to the engines."""

from dataclasses import dataclass
from typing import Protocol

from paceline.remote.worker import Worker


@dataclass(frozen=True, slots=True)
class Weights:
    version: int
    checksum: int | None = None  # over all bytes; None if the engine reads the trainer's memory


class WeightTransport(Protocol):
    """The controller's view of a transport."""

    async def publish(self, version: int) -> Weights:
        """Make the trainer's weights available and return what engines need to load them."""
        ...

    async def attach(self, engine: Worker) -> None:
        """Prepare an engine that joins later or has recovered to load what is published."""
        ...
