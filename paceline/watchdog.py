"""Watchdog: notices that a run makes no progress, says who waits for whom, and ends the run.

`StallMonitor` decides; it gets the time as an argument. The loop asks one with the time of its
event loop. A separate thread asks another one, because an event loop that is blocked (time.sleep in
an environment) notices nothing.

Waits for: the event loop to answer, at most `limit_s`.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from paceline.background import Background, location
from paceline.errors import StalledError
from paceline.remote.stacks import Traced, unanswered, write_stacks
from paceline.remote.worker import Worker
from paceline.suspend import SuspendAwareClock

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 1.0
WARN_S = 10.0  # a blocked event loop is reported after this time
END_S = 60.0  # for a run that was told to fail, to clean up


class Progress(NamedTuple):
    """What a run has done. Groups and steps count as progress; tokens only as a sign of life."""

    finished: tuple[int, ...]
    tokens: int = 0


class Patience(NamedTuple):
    """Maximum seconds without progress, and the setting that says so."""

    seconds: float
    setting: str


class StallMonitor:
    """Measures how long nothing was finished, and how long no token was generated either."""

    def __init__(self, now: float) -> None:
        self._last = Progress(())
        self._finished_at = self._moved_at = now

    def check(
        self, progress: Progress | None, now: float, quiet: Patience, busy: Patience
    ) -> str | None:
        """Return what is wrong. `quiet` is for no sign of life, `busy` for tokens alone.

        `progress` is None while none is expected.
        """
        if progress is None or progress.finished != self._last.finished:
            self._finished_at = now
        if progress != self._last:
            self._last, self._moved_at = progress or Progress(()), now
        for since, limit, what in (
            (self._moved_at, quiet, "no progress"),
            (self._finished_at, busy, "no group was finished and no step made"),
        ):
            if (still_s := now - since) > limit.seconds:
                return f"{what} for {still_s:.0f} s ({limit.setting} = {limit.seconds:g})"
        return None


class Waits(dict[str, str]):
    """What each task waits for, and since when."""

    def __init__(self) -> None:
        super().__init__()
        self._since: dict[str, float] = {}

    def __setitem__(self, who: str, what: str) -> None:
        if self.get(who) != what:
            self._since[who] = asyncio.get_running_loop().time()
        super().__setitem__(who, what)

    def describe(self, now: float) -> list[str]:
        return [
            f"{who} waits for {what} (for {now - self._since[who]:.0f} s)"
            for who, what in self.items()
        ]


class Watchdog:
    """Thread that watches the event loop of a run, and the report when a run stalls."""

    def __init__(
        self,
        workers: Callable[[], Sequence[Worker]],
        limit_s: float,
        folder: Path | None = None,
        others: Callable[[], Sequence[Traced]] = tuple,
    ) -> None:
        """Watch the event loop that runs now.

        `limit_s`: for a blocked event loop. `folder`: for the stacks of all processes, with those
        of `others` that are not workers.
        """
        self._workers, self._limit_s, self._folder = workers, limit_s, folder
        self._others = others
        self._check: Callable[[float], str | None] | None = None
        self._fail: Callable[[str], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._background = Background.current()
        self._stop, self._answered = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def watch(self, check: Callable[[float], str | None], fail: Callable[[str], None]) -> None:
        """Watch a run too: `check(now)` says what is wrong; `fail` is called in the event loop."""
        self._check, self._fail = check, fail

    async def within(self, limit: Patience, what: str, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a stage of the start, in which nothing else notices that a worker is gone.

        Raises WorkerDied if a worker dies meanwhile, and StalledError at the limit.
        """
        task = asyncio.ensure_future(work)
        deaths = [worker.died for worker in self._workers()]
        waiting: set[asyncio.Future[Any]] = {task, *deaths}
        try:
            await asyncio.wait(waiting, timeout=limit.seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            for death in deaths:
                if death.done():
                    death.result()
            problem = f"{what} took longer than {limit.setting} = {limit.seconds:g} s"
            raise await asyncio.to_thread(self.report, problem)
        finally:
            task.cancel()
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def report(self, problem: str) -> StalledError:
        """Write the stacks of all processes and return the error. Takes some seconds at most."""
        workers = self._workers()
        problem = "; ".join([problem, *(text for w in workers for text in unanswered(w))])
        if self._folder is not None:
            path = self._folder / "stacks.txt"
            with suppress(OSError):
                write_stacks(path, problem, workers, self._others())
                problem += f". Python stacks of all processes: {path}"
        return StalledError(problem)

    def _run(self) -> None:
        clock = SuspendAwareClock()
        blocked_since, warned, failed_at = clock.now(), False, None
        self._ping()
        while not self._stop.wait(POLL_S):
            now = clock.now(waited=POLL_S)
            if self._answered.is_set():
                blocked_since, warned = now, False
                self._ping()
            if (blocked_s := now - blocked_since) > WARN_S and not warned:
                warned = True
                log.warning("%s", self._blocked(blocked_s))
            if blocked_s > self._limit_s:
                problem = f"{self._blocked(blocked_s)} (stall_timeout_s = {self._limit_s:g})"
                return self._abandon(problem)
            if failed_at is None and self._check and (problem := self._check(now) or ""):
                failed_at = now
                self._post(partial(self._fail, problem) if self._fail else None)
            elif failed_at is not None and now - failed_at > END_S:
                return self._abandon(f"a run without progress does not end; {problem}")

    def _ping(self) -> None:
        self._answered.clear()
        self._post(self._answered.set)

    def _post(self, callback: Callable[[], object] | None) -> None:
        if callback:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(callback)

    def _blocked(self, seconds: float) -> str:
        return (
            f"the event loop of the run has been blocked for {seconds:.0f} s at "
            f"{location(self._watched)}: code in it must not block; use await, or "
            "asyncio.to_thread"
        )

    def _abandon(self, problem: str) -> None:
        error = self.report(problem)
        if self._background is not None:
            self._background.abandon(error)
        else:  # the caller made the event loop and must end it
            log.critical("%s", error)
