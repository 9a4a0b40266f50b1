"""Observer of a run in the same process: records every step and a poll of the engines per second.

It can also pause and resume the run, like `paceline pause` and `paceline resume`, and measure
whether that took effect.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.control import send_command
from paceline.errors import PacelineError, first_error
from paceline.loop import Metrics
from paceline.notifier import Notifier
from paceline.rollout.engine import EngineStats
from paceline.run import train
from paceline.types import Group

log = logging.getLogger(__name__)

# Engines report once a second, and polls are one second apart: after three polls, every engine's
# statistics are from after the pause.
POLLS_UNTIL_CURRENT = 3
PAUSE_POLLS = 2  # of a pause, after these


@dataclass(frozen=True, slots=True)
class Poll:
    at_s: float  # wall time, as in the step metrics
    queue_utilization: float
    tokens: int
    busy_s: float  # mean over the engines


@dataclass(frozen=True, slots=True)
class Pause:
    """Outcome of pausing and resuming a running job."""

    paused: bool  # reply of pause_rollout
    pause_s: float  # seconds until the reply
    effective: bool  # every engine is paused or, depending on `on_sync`, has no running sequence
    tokens: int  # generated while paused
    watched_s: float  # seconds over which these tokens were counted
    resumed: bool  # reply of resume_rollout
    resume_s: float  # seconds until the first new token; polled once a second


class Watcher:
    """Observer that records steps and engine polls."""

    def __init__(self) -> None:
        self.first_step: int | None = None
        self.steps: list[Metrics] = []
        self.polls: list[Poll] = []
        self.engines: Sequence[EngineStats] = ()
        self._changed = Notifier()
        self._ended = False

    def begin(self, first_step: int) -> "Watcher":
        self.first_step = first_step
        log.info("workers are ready; continuing after step %d", first_step)
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
        self.polls.append(Poll(time.time(), queue_utilization, self.tokens, busy))
        self._changed.notify_all()

    def end(self, *_: object) -> None:
        """Mark the run as ended, so that pending waits fail instead of waiting forever."""
        self._ended = True
        self._changed.notify_all()

    @property
    def tokens(self) -> int:
        return sum(engine.tokens for engine in self.engines)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._ended:
                raise PacelineError(
                    "the run ended before it had been paused and resumed: increase its steps"
                )
            await self._changed.wait()

    async def wait_for_polls(self, count: int) -> None:
        target = len(self.polls) + count
        await self.until(lambda: len(self.polls) >= target)

    async def pause_and_resume(self, run_dir: Path, polls: int) -> Pause:
        """After the first step, pause the run for this many polls and resume it."""
        await self.until(lambda: bool(self.steps))
        begun = time.monotonic()
        paused = await asyncio.to_thread(send_command, run_dir, "pause")
        replied = time.monotonic()
        await self.wait_for_polls(POLLS_UNTIL_CURRENT)
        before, since = self.tokens, time.monotonic()
        await self.wait_for_polls(polls)
        after, watched = self.tokens, time.monotonic() - since
        effective = bool(self.engines) and all(
            engine.paused or not engine.running for engine in self.engines
        )
        resuming = time.monotonic()
        resumed = await asyncio.to_thread(send_command, run_dir, "resume")
        await self.until(lambda: self.tokens > after)
        log.info("paused for %.1f s: %d tokens were generated", watched, after - before)
        return Pause(
            paused=paused is True,
            pause_s=replied - begun,
            effective=effective,
            tokens=after - before,
            watched_s=watched,
            resumed=resumed is True,
            resume_s=time.monotonic() - resuming,
        )


async def train_watched(
    config: RunConfig, watcher: Watcher, pause: bool
) -> tuple[dict[str, Any], Pause | None]:
    """Run with this observer; return its summary, and what a pause did if there was one."""
    try:
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(train(config, watcher.begin))
            training.add_done_callback(watcher.end)
            pausing = (
                tasks.create_task(watcher.pause_and_resume(Path(config.run_dir), PAUSE_POLLS))
                if pause
                else None
            )
    except BaseExceptionGroup as failed:
        raise first_error(failed) from None
    return training.result(), pausing.result() if pausing else None
