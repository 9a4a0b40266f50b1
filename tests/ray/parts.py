"""A worker's part for tests that are about workers."""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import DataError


class Part:
    def __init__(self) -> None:
        self._calls: list[int] = []
        self._ticks = 0
        self._ticking = False

    def work(self) -> list[int] | None:
        if not self._ticking:
            return None
        self._ticks += 1
        return [self._ticks]

    def tick(self, on: bool) -> None:
        """Send an event for every turn of the host's loop."""
        self._ticking = on

    def note(self, number: int) -> int:
        self._calls.append(number)
        return number

    def noted(self) -> list[int]:
        return self._calls

    def refuse(self) -> None:
        raise DataError("not this")

    def where(self) -> tuple[int, int]:
        """This process, and the raylet that started it: one per node."""
        return os.getpid(), os.getppid()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def total(self, number: int) -> int:
        value = torch.tensor(number + dist.get_rank())
        dist.all_reduce(value)
        return int(value)


def build() -> Mapping[str, Any]:
    torch.set_num_threads(1)
    return {"part": Part()}
