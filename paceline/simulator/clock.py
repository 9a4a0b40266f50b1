"""Event loop with a virtual clock: sleeping takes no time, so thousands of runs take seconds."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

NEVER_S = 1e12  # deadlines from here on are never reached


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock: every task waits and no timer is set")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Set a timer; one that is never reached costs no time."""
        if when >= NEVER_S:
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(when, callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call the function at once: a thread would need real time."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def run_virtual(work: Coroutine[Any, Any, Any], limit_s: float = 1e6) -> Any:
    """Run `work` in virtual time; a wait that would never end raises an error."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_limited(work, limit_s))


async def _limited(work: Coroutine[Any, Any, Any], limit_s: float) -> Any:
    async with asyncio.timeout(limit_s):
        return await work
