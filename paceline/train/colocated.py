"""What shares a device with a train engine: it holds memory there, and may have to make way for a turn of training."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ColocatedEngine:
    name: str
    held: Callable[[], int]  # bytes on the device
    release_device: (
        Callable[[], None] | None
    )  # called before training changes weights or needs memory; None: it works beside it
