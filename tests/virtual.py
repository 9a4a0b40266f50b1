"""An event loop whose clock jumps: sleeping costs nothing, so thousands of seeds of the real loop run in seconds."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock: every coroutine waits and no timer is set")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(work: Coroutine[Any, Any, Any], limit_s: float = 1e6) -> Any:
    """Run to the end in virtual time; a wait that would never end raises instead of hanging."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_limited(work, limit_s))


async def _limited(work: Coroutine[Any, Any, Any], limit_s: float) -> Any:
    async with asyncio.timeout(limit_s):
        return await work
