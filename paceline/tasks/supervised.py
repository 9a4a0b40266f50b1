"""The tasks of a run, children of one task group: the first that fails ends the run."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from paceline.errors import WorkerDied

Work = Callable[..., Awaitable[None]]


class Tasks:
    def __init__(self) -> None:
        self.group = asyncio.TaskGroup()
        self.stopping = False  # so tasks may be cancelled
        self._beside: dict[asyncio.Task[None], None] = {}

    def start(self, name: str, work: Work, *args: Any) -> asyncio.Task[None]:
        """Start a task that the run waits for."""
        return self.group.create_task(self._supervised(name, work, *args), name=name)

    def start_beside(self, name: str, work: Work, *args: Any) -> asyncio.Task[None]:
        """Start a task that the end of training cancels."""
        task = self.start(name, work, *args)
        self._beside[task] = None
        task.add_done_callback(lambda done: self._beside.pop(done))
        return task

    def cancel(self) -> None:
        """Cancel what runs beside training."""
        for task in list(self._beside):
            task.cancel()

    async def _supervised(self, name: str, work: Work, *args: Any) -> None:
        try:
            await work(*args)
        except asyncio.CancelledError:
            if self.stopping:
                raise
            self.stopping = True
            raise WorkerDied(
                f"task {name!r} was cancelled unexpectedly; the run cannot continue"
            ) from None
        except BaseException:
            self.stopping = True  # further cancellations are a consequence
            raise
