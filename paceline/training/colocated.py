"""Rollout engine that shares a device with a train engine and can release it during training."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ColocatedEngine:
    name: str
    held: Callable[[], int]  # returns the bytes that the engine holds on the device
    # Called before training changes weights or needs memory; None if the engine keeps running.
    release_device: Callable[[], None] | None
