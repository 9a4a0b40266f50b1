"""What controller and workers say to each other, over a pipe or between threads."""

import pickle
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


def portable(error: BaseException) -> BaseException:
    """The error, or one that says the same: those of some libraries can be pickled but not unpickled, so nobody would hear of them."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class Event:
    """Worker to controller, unasked: something a role produced."""

    role: str
    value: Any


@dataclass(frozen=True, slots=True)
class Deferred:
    """What a method returns when its answer is not there yet: others are answered meanwhile, and parts work."""

    done: Callable[[], bool]
    result: Callable[[], Any]
