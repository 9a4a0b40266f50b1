"""Description of one published version of the weights, sent to the engines."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weights:
    version: int
    checksum: int | None = None  # over all bytes; None if the engine reads the trainer's memory
