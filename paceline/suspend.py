"""An event loop for which no time passes while its process is stopped (Ctrl-Z, a job that a
scheduler suspends): deadlines wait with it."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

SUSPEND_THRESHOLD_S = 2.0  # between two looks at the clock, beyond what was to be waited for


class SuspendAwareClock:
    """Time without stops."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._seen = monotonic()
        self._stopped_s = 0.0  # in all

    def now(self, waited: float = 0.0) -> float:
        """Up to `waited` seconds may have passed since the last look."""
        seen, self._seen = self._seen, self._monotonic()
        if (late := self._seen - seen - waited) > SUSPEND_THRESHOLD_S:
            self._stopped_s += late
        return self._seen - self._stopped_s


def ignore_suspended_time(loop: asyncio.AbstractEventLoop) -> None:
    """From here on this loop goes by such a clock. One that is not of asyncio's own make keeps its
    time."""
    waits: Any = getattr(loop, "_selector", None)
    if waits is None or isinstance(getattr(loop.time, "__self__", None), SuspendAwareClock):
        return
    clock, select = SuspendAwareClock(loop.time), waits.select

    def watched(timeout: float | None = None) -> Any:
        clock.now()
        events = select(timeout)
        clock.now(waited=float("inf") if timeout is None else max(0.0, timeout))
        return events

    waits.select, loop.time = watched, clock.now  # type: ignore[method-assign]
