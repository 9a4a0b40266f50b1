"""The description of one published set of weights, as it travels from the trainer to the engines."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weights:
    version: int
    checksum: int | None = (
        None  # over all bytes; None when the engine reads the trainer's own memory
    )
