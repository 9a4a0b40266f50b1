"""When checkpoints are due, and their writing beside training: one at a time.

Waits for: the copy of the weights in host memory, and the files of the checkpoint before.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

# Returns what writes the checkpoint of a step, with the state at the time of the call. With a
# function, it calls it as soon as training may continue.
Save = Callable[[int, Callable[[], None] | None], Coroutine[Any, Any, Any]]

LONG_WAIT_S = 1.0  # for the checkpoint before, from which on it is reported
END_TIMEOUT_S = 30.0  # for a checkpoint that is being written when the run fails


class Saver:
    def __init__(self, save: Save, every: int, every_s: float, first_step: int = 0) -> None:
        """`every` steps or `every_s` seconds between checkpoints; 0: never."""
        self.saved_step = first_step
        self._save, self._every, self._every_s = save, every, every_s
        self._clock = asyncio.get_running_loop().time
        self._begun = self._clock()  # of the last checkpoint
        self._writing: asyncio.Task[Any] | None = None
        self._seconds = self._waited = 0.0
        self._reported = False

    def due(self, step: int) -> bool:
        by_time = self._every_s > 0 and self._clock() - self._begun >= self._every_s
        return by_time or (self._every > 0 and step % self._every == 0)

    async def save(self, step: int, beside: bool = True) -> "asyncio.Task[Any] | None":
        """Save a step unless it is saved; return the task that fails if the checkpoint does.

        With `beside`, return as soon as training may continue; otherwise, when it is complete.
        """
        begun = self._clock()
        if step <= self.saved_step:
            await self.written()
            return self._writing
        copied = asyncio.Event()
        saving = self._save(step, copied.set if beside else None)  # the state of this moment
        try:
            await self.written()
        except BaseException:
            saving.close()
            raise
        self._report(step, begun)
        self._begun = self._clock()
        self._writing = asyncio.create_task(saving, name=f"checkpoint {step}")
        self._writing.add_done_callback(lambda _: copied.set())
        await copied.wait()
        if self._writing.done():
            self._writing.result()
        self.saved_step = step
        self._seconds = self._clock() - begun
        return self._writing

    async def written(self) -> None:
        """Wait until no checkpoint is being written; raise if the last one failed."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def check(self) -> None:
        """Raise if the last checkpoint failed."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def end(self, timeout_s: float) -> None:
        """Let the checkpoint that is being written become complete in this time, or stop it."""
        if self._writing is not None and not self._writing.done():
            await asyncio.wait({self._writing}, timeout=timeout_s)
            self._writing.cancel()
            await asyncio.wait({self._writing})
            if self._writing.cancelled():
                log.warning(
                    "the last checkpoint was stopped before it was complete (after %g s); a "
                    "resumed run continues from the one before it, or from the start",
                    timeout_s,
                )
            elif error := self._writing.exception():
                log.warning("the last checkpoint was not saved: %s", error)

    def metrics(self) -> dict[str, float]:
        """Return the seconds that training has waited since the last call."""
        found = {"time/save_s": self._seconds, "time/save_wait_s": self._waited}
        self._seconds = self._waited = 0.0
        return found

    def _report(self, step: int, begun: float) -> None:
        self._waited = self._clock() - begun
        if self._waited > LONG_WAIT_S and not self._reported:
            self._reported = True
            log.warning(
                "step %d waited %.1f s until the checkpoint of step %d was written: they are due "
                "faster than the disk writes them. Raise save_every or save_every_s; "
                "time/save_wait_s has the seconds of each step",
                step,
                self._waited,
                self.saved_step,
            )
