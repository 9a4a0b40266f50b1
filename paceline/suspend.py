"""Event-loop clock that excludes time in which the process is suspended (Ctrl-Z, SIGSTOP), so that
deadlines do not expire meanwhile."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

SUSPEND_THRESHOLD_S = 2.0  # between two readings of the clock, in addition to the planned wait


class SuspendAwareClock:
    """Monotonic time without the time in which the process was suspended."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._last = monotonic()
        self._suspended_s = 0.0  # in total

    def now(self, waited: float = 0.0) -> float:
        """Return the time; up to `waited` seconds may have passed since the last reading."""
        last, self._last = self._last, self._monotonic()
        if (late := self._last - last - waited) > SUSPEND_THRESHOLD_S:
            self._suspended_s += late
        return self._last - self._suspended_s


def ignore_suspended_time(loop: asyncio.AbstractEventLoop) -> None:
    """Give an event loop of asyncio a SuspendAwareClock. Loops of other libraries keep theirs."""
    selector: Any = getattr(loop, "_selector", None)
    if selector is None or isinstance(getattr(loop.time, "__self__", None), SuspendAwareClock):
        return
    clock, select = SuspendAwareClock(loop.time), selector.select

    def timed_select(timeout: float | None = None) -> Any:
        clock.now()
        events = select(timeout)
        clock.now(waited=float("inf") if timeout is None else max(0.0, timeout))
        return events

    selector.select, loop.time = timed_select, clock.now  # type: ignore[method-assign]
