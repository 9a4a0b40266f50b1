"""A part for tests of workers: it records calls and produces events."""

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import DataError


def fail() -> None:
    raise ValueError("cannot be unpickled")


class Unreadable:
    def __reduce__(self) -> Any:
        return fail, ()


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
        """Produce an event in every iteration of the host's loop."""
        self._ticking = on

    def record(self, number: int) -> int:
        self._calls.append(number)
        return number

    def recorded(self) -> list[int]:
        return self._calls

    def fail(self) -> None:
        raise DataError("it failed")

    def unreadable(self) -> Unreadable:
        return Unreadable()

    def where(self) -> tuple[int, int]:
        """Return the PIDs of this process and of its raylet, which identifies the node."""
        return os.getpid(), os.getppid()

    def block(self) -> None:
        time.sleep(600)

    def output(self, text: str) -> None:
        print(text, flush=True)

    def total(self, number: int) -> int:
        value = torch.tensor(number + dist.get_rank())
        dist.all_reduce(value)
        return int(value)


def build() -> Mapping[str, Any]:
    torch.set_num_threads(1)
    return {"part": Part()}
