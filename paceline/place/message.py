"""What controller and workers say to each other, over a pipe or between threads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """Controller to worker: call `method` of the part that plays `role`."""

    id: int
    role: str
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """Worker to controller: the result of a call, or the error it ended with."""

    id: int
    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Worker to controller, unasked: something a role produced."""

    role: str
    value: Any


@dataclass(frozen=True, slots=True)
class Later:
    """What a method returns when its answer is not there yet: others are answered meanwhile, and parts work."""

    done: Callable[[], bool]
    result: Callable[[], Any]
