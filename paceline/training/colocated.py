"""Rollout engine that shares a device with a train engine and can release it during training."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ColocatedEngine:
    name: str
    held: Callable[[], int]  # returns the bytes that the engine holds on the device
    # Called before training changes weights or needs memory. An engine that generates beside
    # training prepares for new weights, and the others release the device.
    before_training: Callable[[], None] | None
