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
from collections.abc import Callable, Sequence

from paceline.errors import RewardError, RolloutError, StalledError, first_error
from paceline.group_metrics import equal_rewards
from paceline.queue.admission import Admission
from paceline.queue.ledger import Ledger
from paceline.queue.message_queue import MessageQueueClient
from paceline.rollout.fleet import Fleet
from paceline.rollout.quarantine import Quarantined
from paceline.rollout.rollouter import Rollouter
from paceline.synchronizer import ParameterSynchronizer
from paceline.tasks.groups import GroupAccounts
from paceline.tasks.parts import (
    Evaluations,
    LoopSettings,
    Metrics,
    Observer,
    Source,
    StepTrainer,
)
from paceline.tasks.supervised import Tasks
from paceline.tasks.train import CheckWeights, TrainTask
from paceline.timeline import Timeline
from paceline.training.saving import END_TIMEOUT_S, Save
from paceline.watchdog import Patience, Progress, StallMonitor, Waits

__all__ = ["Evaluations", "Loop", "LoopSettings", "Metrics", "Observer", "Source", "StepTrainer"]

log = logging.getLogger(__name__)


class Loop:
    def __init__(
        self,
        settings: LoopSettings,
        *,
        source: Source,
        rollouter: Rollouter,
        fleet: Fleet,
        queue: MessageQueueClient,
        admission: Admission,
        ledger: Ledger,
        trainer: StepTrainer,
        synchronizer: ParameterSynchronizer,
        observer: Observer,
        save: Save,
        guards: Sequence[tuple[str, asyncio.Future[None]]] = (),
        check_weights: CheckWeights | None = None,
        evaluations: Evaluations | None = None,
        report_stall: Callable[[str], StalledError] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """`check_weights`: starts a check that the engines have a version's weights.

        `report_stall` turns a description into the error; it may block for some seconds.
        """
        self.waiting_for = Waits()  # by task, for the error of a stalled run
        self._settings = settings
        self._source = source
        self._rollouter = rollouter
        self._fleet = fleet
        self._client = queue
        self._queue = queue.queue
        self._admission = admission
        self._ledger = ledger
        self._synchronizer = synchronizer
        self._observer = observer
        # Observers may lack it; it gets each group that was generated, and those dropped later.
        self._seen = getattr(observer, "group_seen", lambda kind, group: None)
        self._guards = guards
        self._report_stall = report_stall
        self._problem = ""  # that the watchdog has noticed
        self._timeline = timeline or Timeline()
        self._changed = self._queue.changed
        self._tasks = Tasks()
        self._accounts = GroupAccounts(
            settings, ledger, admission, self._queue, self._timeline, self._seen
        )
        self._train = TrainTask(
            settings,
            self._tasks,
            self._accounts,
            self._timeline,
            self.waiting_for,
            source=source,
            fleet=fleet,
            queue=queue,
            admission=admission,
            ledger=ledger,
            trainer=trainer,
            synchronizer=synchronizer,
            observer=observer,
            save=save,
            check_weights=check_weights,
            evaluations=evaluations,
        )
        if not (admission.changed is rollouter.changed is self._changed):
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
                beside("fleet", self._fleet.run, self._synchronizer.catch_up)
                for name, death in self._guards:
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
        self._ledger.check()

    def stop(self) -> None:
        """End the run after the current step, with a checkpoint."""
        self._train.stop()

    # --- tasks ---

    async def _feed(self) -> None:
        while self.step < self._settings.steps:  # else only the summary was missing
            while self._rollouter.paused or self._admission.free <= 0:
                self.waiting_for["feed"] = (
                    "resume_rollout()"
                    if self._rollouter.paused
                    else "a free ticket (returned after the next sync) and room in the queue"
                )
                await self._changed.wait()
            for _ in range(self._admission.free):
                seq = self._ledger.issue()
                self._admission.admit(seq)
                self._tasks.start_beside(f"rollout {seq}", self._rollout, seq)

    async def _rollout(self, seq: int) -> None:
        try:
            group = await self._rollouter.run(seq, self._source[seq])
        except Quarantined as error:
            self._accounts.drop(seq, "quarantined", str(error))
            log.warning("group %d is dropped: %s", seq, error)
        except (RewardError, RolloutError) as error:
            self._accounts.drop_failed(seq, error)
        else:
            self._seen("generated", group)
            if self._settings.dynamic_sampling and equal_rewards(group):
                self._accounts.drop_uniform(group, self.step + 1)
            else:
                self._timeline.group("group", seq, "queued")
                self._client.put_samples(group, group.version_min, key=seq)

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        check = self.stall_check(clock())
        while True:
            await asyncio.sleep(1.0)
            self._observer.engines_polled(self._fleet.stats(), self._queue.utilization)
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
        if self._report_stall is None:
            return StalledError(problem)
        return await asyncio.to_thread(self._report_stall, problem)

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
