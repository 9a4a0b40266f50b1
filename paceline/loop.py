"""The loop. Every mode runs these tasks; only placement and schedule differ.

    task      waits for                             produces                       unblocked by
    feed      a free ticket, rollouter not paused   a rollout per prompt           sync, resume
    rollout*  engines, reward                       a scored group in the queue    its engine
    evaluate* engines, reward                       scores of held-out prompts     its engine
    train     the groups_per_step oldest groups     a step, then new weights       rollout
    check*    engines, trainer                      MismatchError                  its engine
    save*     workers that write their files        a checkpoint                   its workers
    watch     (polls every second; watchdog.py)     StalledError, live statistics  -
    fleet     heartbeats and deaths of engines      their replacements             -
    guard*    the death of any other worker         WorkerDied                     -

All are children of one task group: the first that fails ends the run with its error.
"""

import asyncio
import logging
from collections.abc import Callable

from paceline.data.stream import RowsEndedError
from paceline.errors import RewardError, RolloutError, StalledError, first_error
from paceline.group_metrics import equal_rewards
from paceline.rollout.quarantine import Quarantined
from paceline.tasks.groups import GroupAccounts
from paceline.tasks.parts import (
    Evaluations,
    LoopSettings,
    Metrics,
    Observer,
    Parts,
    Source,
    StepTrainer,
)
from paceline.tasks.supervised import Tasks
from paceline.tasks.train import TrainTask
from paceline.training.saving import END_TIMEOUT_S
from paceline.watchdog import Patience, Progress, StallMonitor, Waits

__all__ = [
    "Evaluations",
    "Loop",
    "LoopSettings",
    "Metrics",
    "Observer",
    "Parts",
    "Source",
    "StepTrainer",
]

log = logging.getLogger(__name__)


class Loop:
    def __init__(self, parts: Parts) -> None:
        self.waiting_for = Waits()  # by task, for the error of a stalled run
        self._parts = parts
        self._settings, self._timeline = parts.settings, parts.timeline
        self._rollouter, self._fleet = parts.rollouter, parts.fleet
        self._queue = parts.queue.queue
        self._problem = ""  # that the watchdog has noticed
        self._rows_ended = False
        self._tasks = Tasks()
        self._accounts = GroupAccounts(parts)
        self._train = TrainTask(parts, self._tasks, self._accounts, self.waiting_for)
        if not (parts.admission.changed is self._rollouter.changed is self._queue.changed):
            raise ValueError(
                "queue, admission and rollouter must share one notifier, or the loop misses changes"
            )

    @property
    def step(self) -> int:
        """Number of completed steps; also the trainer's policy version."""
        return self._train.step

    async def run(self, first_step: int = 0) -> None:
        """Train until `steps` are done. `first_step` is where a resumed run starts."""
        tasks, beside = self._tasks, self._tasks.start_beside
        self._rollouter.watch = self._timeline.group
        self._train.begin(first_step)
        try:
            async with tasks.group:
                beside("feed", self._feed)
                beside("watch", self._watch)
                beside("fleet", self._fleet.run, self._parts.synchronizer.catch_up)
                for name, death in self._parts.guards:
                    # Cancelling the guard must not cancel the future.
                    beside(f"guard of {name}", asyncio.shield, death)
                train = tasks.start("train", self._train.run)
                try:
                    await asyncio.wait({train})
                finally:
                    tasks.stopping = True
                tasks.cancel()
        except BaseExceptionGroup as failed:
            await self._train.saver.end(END_TIMEOUT_S)
            raise first_error(failed) from None
        except asyncio.CancelledError:
            await self._train.saver.end(0.0)
            raise
        self._parts.ledger.check()

    def stop(self) -> None:
        """End the run after the current step, with a checkpoint."""
        self._train.stop()

    # --- tasks ---

    async def _feed(self) -> None:
        admission, ledger = self._parts.admission, self._parts.ledger
        while self.step < self._settings.steps:  # else only the summary was missing
            while self._rollouter.paused or admission.free <= 0 or self._has_last_rows():
                self.waiting_for["feed"] = (
                    "resume_rollout()"
                    if self._rollouter.paused
                    else "a free ticket (returned after the next sync) and room in the queue"
                )
                await self._queue.changed.wait()
            for _ in range(1 if self._rows_ended else admission.free):
                seq = ledger.issue()
                admission.admit(seq)
                self._tasks.start_beside(f"rollout {seq}", self._rollout, seq)

    def _has_last_rows(self) -> bool:
        """Return whether the rows have ended, and the groups there are suffice for all steps."""
        needed = (self._settings.steps - self.step) * self._settings.groups_per_step
        return self._rows_ended and len(self._parts.ledger.outstanding) >= needed

    async def _rollout(self, seq: int) -> None:
        try:
            prompt = self._parts.source[seq]
        except RowsEndedError:
            self._rows_ended = True
            self._accounts.drop(seq, "rows_ended")
            if not self._has_last_rows():
                raise
            return
        try:
            group = await self._rollouter.run(seq, prompt)
        except Quarantined as error:
            self._accounts.drop(seq, "quarantined", str(error))
            log.warning("group %d is dropped: %s", seq, error)
        except (RewardError, RolloutError) as error:
            self._accounts.drop_failed(seq, error)
        else:
            self._parts.seen("generated", group)
            if self._settings.dynamic_sampling and equal_rewards(group):
                self._accounts.drop_uniform(group, self.step + 1)
            else:
                self._timeline.group("group", seq, "queued")
                self._parts.queue.put_samples(group, group.version_min, key=seq)

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        check = self.stall_check(clock())
        while True:
            await asyncio.sleep(1.0)
            self._parts.observer.engines_polled(self._fleet.stats(), self._queue.utilization)
            if problem := self._problem or check(clock()):
                waits = [*self.waiting_for.describe(clock()), *self._rollouter.group_stages()]
                waits += self._fleet.unavailable_engines()
                raise await self._stalled(f"{problem}: {'; '.join(waits)}")

    # --- supervision ---

    def stall_check(self, now: float) -> Callable[[float], str | None]:
        """Return a function that says, at a time, whether the run has stalled. For any thread."""
        monitor = StallMonitor(now)
        return lambda now: monitor.check(self._progress(), now, *self._patience())

    def stalled(self, problem: str) -> None:
        """End the run with a StalledError, soon."""
        self._problem = problem

    async def _stalled(self, problem: str) -> StalledError:
        if self._parts.report_stall is None:
            return StalledError(problem)
        return await asyncio.to_thread(self._parts.report_stall, problem)

    def _progress(self) -> Progress | None:
        if self._rollouter.paused_by("user"):
            return None
        tokens = sum(stats.tokens for stats in self._fleet.stats())
        # The end of a sync or checkpoint is progress: it may take longer than the wait for groups.
        finished = self.step, self._rollouter.finished, self._rollouter.paused, self._train.taking
        return Progress(finished, tokens)

    def _patience(self) -> tuple[Patience, Patience]:
        """Return the limits without a sign of life, and without a group while tokens are made."""
        settings = self._settings
        quiet = Patience(settings.stall_timeout_s, "stall_timeout_s")
        step = Patience(settings.step_timeout_s, "step_timeout_s")
        episode = Patience(settings.episode_timeout_s, "rollout.episode_timeout_s")
        if not self._train.taking:  # a train step, weight sync or checkpoint is running
            return max(quiet, step), max(quiet, step, episode)
        return quiet, max(quiet, episode)
