"""Messages between the controller and its workers, over a pipe, a Ray actor or between threads."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.remote.device_clock import ClockReport

Data = TypeVar("Data")


@dataclass(frozen=True, slots=True)
class Call:
    """Controller to worker: call `method` of a part."""

    id: int
    part: str
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """Worker to controller: the result of a call, or its error."""

    id: int
    value: Any = None
    error: BaseException | None = None
    clock: ClockReport | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Event:
    """Worker to controller: something that a part produced between calls."""

    part: str
    value: Any


@dataclass(frozen=True, slots=True)
class Deferred:
    """Return value of a method whose result is not available yet. The worker serves other calls and
    runs its parts until `done()`.

    A method whose result another thread produces returns a `concurrent.futures.Future` instead: the
    reply is sent from that thread, even while a part computes.
    """

    done: Callable[[], bool]
    result: Callable[[], Any]


def portable(error: BaseException) -> BaseException:
    """Return the error, or an equivalent one if it cannot be unpickled.

    Errors of some libraries can be pickled but not unpickled, so they would never arrive.
    """
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def pickled(dumps: Callable[[Any], Data], message: Any) -> Data:
    """Pickle a message. Raise PicklingError instead of OSError, which a closed pipe raises."""
    try:
        return dumps(message)
    except OSError as error:  # of code of a value
        raise pickle.PicklingError(f"{type(error).__name__}: {error}") from error
