"""Notifier for state changes. Every waiter wakes up and rechecks its own condition."""

import asyncio


class Notifier:
    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}  # in order, so that runs repeat

    def notify_all(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self) -> None:
        """Return after the next `notify_all()`.

        Check the condition and call this without awaiting in between, or a notification can be
        missed.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)
