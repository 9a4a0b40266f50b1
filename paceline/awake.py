"""An event loop for which no time passes while its process is stopped (Ctrl-Z, a job that a scheduler suspends): deadlines wait with it."""

import asyncio
import selectors
import time
from typing import Any

LATE_S = 2.0  # between two looks at the clock, beyond what was to be waited for


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self._seen = time.monotonic()
        self._stopped_s = 0.0  # in all

    def now(self, waited: float = 0.0) -> float:
        """Time without stops; up to `waited` seconds may have passed since the last look."""
        seen, self._seen = self._seen, time.monotonic()
        if (late := self._seen - seen - waited) > LATE_S:
            self._stopped_s += late
        return self._seen - self._stopped_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now()
        events: list[Any] = super().select(timeout)
        self.now(waited=float("inf") if timeout is None else max(0.0, timeout))
        return events


class AwakeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._waits = _Selector()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.now()
