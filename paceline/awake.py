"""An event loop for which no time passes while its process is stopped (Ctrl-Z, a job that a scheduler suspends): deadlines wait with it."""

import asyncio
import selectors
import time
from typing import Any

LATE_S = 2.0  # a wait that ends this much later than it was to, or so much time between two waits


class _Selector(selectors.DefaultSelector):
    stopped_s = 0.0  # in all
    _left: float | None = None  # when the last wait was over

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        begun = time.monotonic()
        if self._left is not None and (busy := begun - self._left) > LATE_S:
            self.stopped_s += busy
        events: list[Any] = super().select(timeout)
        self._left = time.monotonic()
        if timeout is not None and (late := self._left - begun - max(0.0, timeout)) > LATE_S:
            self.stopped_s += late
        return events


class AwakeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._waits = _Selector()
        super().__init__(self._waits)

    def time(self) -> float:
        return super().time() - self._waits.stopped_s
