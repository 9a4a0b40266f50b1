"""Watches a run from inside its own program: every step, and once a second what engines and queue say. Can pause and resume it, the way
`paceline pause` and `paceline resume` do, and see whether that took effect.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.control import send_command
from paceline.errors import PacelineError
from paceline.loop import Metrics
from paceline.notifier import Notifier
from paceline.rollout.engine import EngineStats
from paceline.types import Group

log = logging.getLogger(__name__)

SETTLED = 3  # looks after which all that is shown was said after the pause: heartbeats come once a second, as looks do


@dataclass(frozen=True, slots=True)
class Look:
    at_s: float  # wall time, as in the metrics of steps
    queue_use: float
    tokens: int
    busy_s: float  # mean over the engines


@dataclass(frozen=True, slots=True)
class Pause:
    """What became of asking a running job to pause and to go on."""

    paused: bool  # what pause_rollout answered
    pause_s: float  # until it had answered
    held: bool  # every engine says that it holds its answers, or, by `on_sync`, has finished or handed back all of them
    tokens: int  # made while it was paused
    watched_s: float  # how long that was looked at
    resumed: bool  # what resume_rollout answered
    resume_s: float  # until there was a new token; seen once a second


class Watcher:
    """An observer of the loop."""

    def __init__(self) -> None:
        self.first_step: int | None = None
        self.steps: list[Metrics] = []
        self.looks: list[Look] = []
        self.engines: Sequence[EngineStats] = ()
        self._changed = Notifier()
        self._ended = False

    def begin(self, first_step: int) -> "Watcher":
        self.first_step = first_step
        log.info("workers are ready; going on after step %d", first_step)
        return self

    def step_done(self, step: int, metrics: Metrics, groups: Sequence[Group]) -> None:
        self.steps.append(metrics)
        shown = (
            "reward/mean",
            "staleness/mean",
            "sample_age_s",
            "time/wait_s",
            "time/train_s",
            "time/sync_s",
            "rollout/tokens",
        )
        log.info("step %d: %s", step, ", ".join(f"{name} {metrics[name]:.4g}" for name in shown))
        self._changed.notify_all()

    def engines_polled(self, engines: Sequence[EngineStats], queue_utilization: float) -> None:
        self.engines = engines
        busy = sum(engine.busy_s for engine in engines) / max(1, len(engines))
        self.looks.append(Look(time.time(), queue_utilization, self.tokens, busy))
        self._changed.notify_all()

    def end(self, *_: object) -> None:
        """The run is over: nothing that is waited for can come any more."""
        self._ended = True
        self._changed.notify_all()

    @property
    def tokens(self) -> int:
        return sum(engine.tokens for engine in self.engines)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._ended:
                raise PacelineError(
                    "the run was over before it had been paused and resumed: give it more steps"
                )
            await self._changed.wait()

    async def more_looks(self, count: int) -> None:
        wanted = len(self.looks) + count
        await self.until(lambda: len(self.looks) >= wanted)

    async def pause_and_resume(self, folder: Path, looks: int) -> Pause:
        """After the first step: pause, watch for so many looks, go on."""
        await self.until(lambda: bool(self.steps))
        begun = time.monotonic()
        paused = await asyncio.to_thread(send_command, folder, "pause")
        answered = time.monotonic()
        await self.more_looks(SETTLED)
        before, since = self.tokens, time.monotonic()
        await self.more_looks(looks)
        after, watched = self.tokens, time.monotonic() - since
        held = bool(self.engines) and all(
            engine.paused or not engine.running for engine in self.engines
        )
        going_on = time.monotonic()
        resumed = await asyncio.to_thread(send_command, folder, "resume")
        await self.until(lambda: self.tokens > after)
        log.info("paused for %.1f s: %d tokens were made", watched, after - before)
        return Pause(
            paused=paused is True,
            pause_s=answered - begun,
            held=held,
            tokens=after - before,
            watched_s=watched,
            resumed=resumed is True,
            resume_s=time.monotonic() - going_on,
        )
