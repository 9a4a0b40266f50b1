"""Parts of a worker: objects whose methods the controller calls by the part's name."""

from collections.abc import Collection, Mapping
from typing import Any

from paceline.remote.device_clock import DeviceClock


class Parts(dict[str, Any]):
    """A worker's parts and their names. Those in `concurrent` work on a second thread.

    A part may have `activities`: by method, what its calls count as on the worker's clock.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        concurrent: Collection[str] = (),
        clock: DeviceClock | None = None,
    ) -> None:
        super().__init__(parts)
        self.concurrent = frozenset(concurrent)
        self.clock = clock or DeviceClock()


def concurrent_parts(parts: Mapping[str, Any]) -> frozenset[str]:
    return parts.concurrent if isinstance(parts, Parts) else frozenset()


def clock_of(parts: Mapping[str, Any]) -> DeviceClock:
    return parts.clock if isinstance(parts, Parts) else DeviceClock()
