"""Deadlines of generations and episodes. They do not run while generation is paused."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial


class Deadlines:
    def __init__(self) -> None:
        # With the seconds that were left when it was paused.
        self._left: dict[asyncio.Timeout, float] = {}

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[Callable[[], float]]:
        """Raise TimeoutError if the context takes longer; provide how many seconds are left."""
        async with asyncio.timeout(seconds) as deadline:
            self._left[deadline] = seconds
            try:
                yield partial(self._seconds_left, deadline)
            finally:
                del self._left[deadline]

    def pause(self) -> None:
        for deadline in self._left:
            if deadline.when() is not None and not deadline.expired():
                self._left[deadline] = self._seconds_left(deadline)
                deadline.reschedule(None)

    def resume(self) -> None:
        now = asyncio.get_running_loop().time()
        for deadline, seconds in self._left.items():
            if deadline.when() is None:
                deadline.reschedule(now + seconds)

    def _seconds_left(self, deadline: asyncio.Timeout) -> float:
        if (when := deadline.when()) is None:
            return self._left[deadline]
        return max(0.0, when - asyncio.get_running_loop().time())
