"""A wake-up call for everyone who waits for a state to change: wait, look again, wait again."""

import asyncio


class Notifier:
    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}  # in the order they came: runs repeat

    def notify_all(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self) -> None:
        """Returns after the next `fire()`. Never miss one: check the state and call this without awaiting in between."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)
