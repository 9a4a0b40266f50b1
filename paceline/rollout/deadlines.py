"""Deadlines of generations and episodes. They do not run while generation is paused.

A step has a thousand of them, and almost none expires. So they share one timer: when it fires,
those that have expired are ended, and the timer is set to the next one.
"""

import asyncio
from types import TracebackType


class Deadline:
    """Context manager that raises TimeoutError if its task takes longer, as `asyncio.timeout`."""

    __slots__ = ("_cancelling", "_end", "_expired", "_left", "_owner", "_task")

    def __init__(self, deadlines: "Deadlines", seconds: float) -> None:
        self._owner, self._left = deadlines, seconds
        self._end: float | None = None  # None: it does not run, and has `_left` seconds
        self._expired = False

    def __enter__(self) -> "Deadline":
        task = asyncio.current_task()
        assert task is not None, "a deadline needs a task, which it cancels"
        self._task, self._cancelling = task, task.cancelling()
        self._owner.add(self)
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._owner.remove(self)
        # A task that was also cancelled by others stays cancelled.
        own = self._expired and self._task.uncancel() <= self._cancelling
        if own and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from error

    @property
    def end(self) -> float | None:
        """When it expires, on the clock of the event loop; None if it does not run."""
        return None if self._expired else self._end

    @property
    def seconds_left(self) -> float:
        if self._end is None:
            return self._left
        return max(0.0, self._end - asyncio.get_running_loop().time())

    def start(self) -> None:
        if self._end is None:
            self._end = asyncio.get_running_loop().time() + self._left
            self._owner.expect(self._end)

    def stop(self) -> None:
        """Keep the seconds that are left until it is started again."""
        if not self._expired:
            self._left, self._end = self.seconds_left, None

    def expire(self) -> None:
        self._expired = True
        self._task.cancel()


class Deadlines:
    def __init__(self) -> None:
        self._all: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def within(self, seconds: float) -> Deadline:
        return Deadline(self, seconds)

    def pause(self) -> None:
        for deadline in self._all:
            deadline.stop()

    def resume(self) -> None:
        for deadline in self._all:
            deadline.start()

    def add(self, deadline: Deadline) -> None:
        self._all[deadline] = None

    def remove(self, deadline: Deadline) -> None:
        del self._all[deadline]
        if not self._all and self._timer:
            self._timer.cancel()
            self._timer = None

    def expect(self, end: float) -> None:
        """Set the timer to this time, unless it is earlier."""
        if self._timer is None or end < self._timer.when():
            if self._timer:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(end, self._check)

    def _check(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time()
        for deadline in self._all:
            if deadline.end is not None and deadline.end <= now:
                deadline.expire()
        ends = [deadline.end for deadline in self._all if deadline.end is not None]
        if ends:
            self.expect(min(ends))
