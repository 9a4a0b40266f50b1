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
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any, Protocol

from paceline.errors import (
    LedgerError,
    NonFiniteError,
    PacelineError,
    RewardError,
    RolloutError,
    StalledError,
    WorkerDied,
    first_error,
)
from paceline.group_metrics import equal_rewards, measure, measure_staleness
from paceline.queue.admission import Admission
from paceline.queue.ledger import Ledger
from paceline.queue.message_queue import DropReason, Item, MessageQueueClient
from paceline.rollout.engine import EngineStats
from paceline.rollout.fleet import Fleet
from paceline.rollout.quarantine import Quarantined
from paceline.rollout.rollouter import Rollouter
from paceline.settings import Settings
from paceline.synchronizer import ParameterSynchronizer
from paceline.timeline import CHECKPOINT, EVALUATION, GROUPS, PAUSE, SYNC, TRAIN, Timeline
from paceline.training.assembly import assemble
from paceline.training.saving import END_TIMEOUT_S, Save, Saver
from paceline.training.skipped import too_many
from paceline.types import Batch, Group, Prompt
from paceline.watchdog import Patience, Progress, StallMonitor, Waits

log = logging.getLogger(__name__)

Metrics = dict[str, float]


# For a weight check, which ends when the engines get newer weights.
CHECK_TIMEOUT_S = 5.0
# Batches of groups that dynamic sampling may filter in a row before the run fails.
FILTERED_IN_A_ROW = 50
UPDATE_SKIPPED = "update_skipped"  # reason of a drop


class Source(Protocol):
    def __getitem__(self, seq: int) -> Prompt: ...

    def observe(self, groups: Sequence[Group]) -> None: ...


class StepTrainer(Protocol):
    async def step(self, batch: Batch, step: int) -> Metrics: ...


class Observer(Protocol):
    def step_done(self, step: int, metrics: Metrics, groups: Sequence[Group]) -> None: ...

    def engines_polled(self, engines: Sequence[EngineStats], queue_utilization: float) -> None: ...


class Evaluations(Protocol):
    """Evaluates held-out prompts with the weights that the engines have."""

    @property
    def saves(self) -> bool: ...  # an evaluated version needs a checkpoint
    @property
    def enough(self) -> bool: ...  # the run should end
    def due(self, step: int) -> bool: ...
    async def run(self, step: int) -> None: ...


class LoopSettings(Settings):
    steps: int
    groups_per_step: int
    sync_every: int = 1
    save_every: int = 0
    save_every_s: float = 0.0
    max_failed_groups: int = 0
    max_skipped_updates: int = 5  # in a row
    dynamic_sampling: bool = False
    stall_timeout_s: float = 300.0
    step_timeout_s: float = 0.0  # of a train step, weight sync or checkpoint, if it is longer
    episode_timeout_s: float = 0.0  # without a group, while tokens are generated, if it is longer
    takes_turns: bool = False  # engines and trainer alternate, so a train step ends evaluations


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
        check_weights: Callable[[Sequence[Group], int], Awaitable[None]] | None = None,
        evaluations: Evaluations | None = None,
        report_stall: Callable[[str], StalledError] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """`check_weights`: starts a check that the engines have a version's weights.

        `report_stall` turns a description into the error; it may block for some seconds.
        """
        self.step = 0  # number of completed steps; also the trainer's policy version
        self.waiting_for = Waits()  # by task, for the error of a stalled run
        self._settings = settings
        self._source = source
        self._rollouter = rollouter
        self._fleet = fleet
        self._client = queue
        self._queue = queue.queue
        self._admission = admission
        self._ledger = ledger
        self._trainer = trainer
        self._synchronizer = synchronizer
        self._observer = observer
        # Observers may lack it; it gets each group that was generated, and those dropped later.
        self._seen = getattr(observer, "group_seen", lambda kind, group: None)
        self._save = save
        self._guards = guards
        self._check_weights = check_weights
        self._check: asyncio.Task[None] | None = None  # of the last version
        self._report_stall = report_stall
        self._problem = ""  # that the watchdog has noticed
        self._timeline = timeline or Timeline()
        self._evaluations = evaluations
        self._evaluation: asyncio.Task[None] | None = None
        self._sync_due = False  # but an evaluation needs the engines' weights
        self._trained: Sequence[Group] = ()  # in the last step
        self._changed = self._queue.changed
        self._rollouts: set[asyncio.Task[None]] = set()
        self._failed = 0
        self._skipped_in_a_row = 0  # train steps whose update was skipped
        # Rewards of the groups that were filtered since the last step.
        self._uniform: Counter[float] = Counter()
        self._stopping = False
        self._stop_requested = False
        self._taking = False  # the train task waits for groups
        self._queue.on_drop = self._dropped
        if not (admission.changed is rollouter.changed is self._changed):
            raise ValueError(
                "queue, admission and rollouter must share one notifier, or the loop misses changes"
            )

    async def run(self, first_step: int = 0) -> None:
        """Train until `steps` are done. `first_step` is where a resumed run starts."""
        self.step, settings = first_step, self._settings
        self._rollouter.watch = self._timeline.group
        self._timeline.enter(GROUPS)
        self._saver = Saver(self._save, settings.save_every, settings.save_every_s, first_step)
        self._queue.set_version(first_step)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                running = [self._start("feed", self._feed), self._start("watch", self._watch)]
                running += [self._start("fleet", self._fleet.run, self._synchronizer.catch_up)]
                running += [
                    self._start(f"guard of {name}", _wait_for, death)
                    for name, death in self._guards
                ]
                train = self._start("train", self._train)
                try:
                    await asyncio.wait({train})
                finally:
                    self._stopping = True
                for task in running + list(self._rollouts):
                    task.cancel()
        except BaseExceptionGroup as failed:
            await self._saver.end(END_TIMEOUT_S)
            raise first_error(failed) from None
        except asyncio.CancelledError:
            await self._saver.end(0.0)
            raise
        self._ledger.check()

    def stop(self) -> None:
        """End the run after the current step, with a checkpoint."""
        self._stop_requested = True
        self._changed.notify_all()

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
                task = self._start(f"rollout {seq}", self._rollout, seq)
                self._rollouts.add(task)
                task.add_done_callback(self._rollouts.discard)

    async def _rollout(self, seq: int) -> None:
        try:
            group = await self._rollouter.run(seq, self._source[seq])
        except Quarantined as error:
            self._drop(seq, "quarantined", str(error))
            log.warning("group %d is dropped: %s", seq, error)
        except (RewardError, RolloutError) as error:
            self._group_failed(seq, error)
        else:
            self._seen("generated", group)
            if self._settings.dynamic_sampling and equal_rewards(group):
                self._filtered(group)
            else:
                self._timeline.group("group", seq, "queued")
                self._client.put_samples(group, group.version_min, key=seq)

    async def _train(self) -> None:
        clock = asyncio.get_running_loop().time
        await self._begin_evaluation()
        while self.step < self._settings.steps and not self._stopping:
            begun = clock()
            self._timeline.enter(GROUPS)
            groups = await self._take()
            if groups is None:
                break
            evaluated_s = await self._evaluated() if self._settings.takes_turns else 0.0
            self._wait(PAUSE, "running generations to pause")
            await self._synchronizer.pause_before_update()
            taken = clock()
            batch = assemble(groups)
            staleness = [self.step - group.version_min for group in groups]
            self._wait(TRAIN, f"train step {self.step + 1}")
            try:
                metrics = await self._trainer.step(batch, self.step)
            except NonFiniteError as error:
                await self._skip(groups, error)
                continue
            self._skipped_in_a_row = 0
            for group, stale in zip(groups, staleness, strict=True):
                self._timeline.group("group", group.seq, None)
                self._ledger.trained(
                    group.seq, uid=group.prompt.uid, step=self.step, staleness=stale
                )
            self._source.observe(groups)
            self._uniform.clear()
            self.step += 1
            self._queue.set_version(self.step)
            trained, self._trained = clock(), groups
            last = self.step == self._settings.steps
            self._sync_due |= last or self.step % self._settings.sync_every == 0
            if last:
                await self._evaluated()
            if self._sync_due and not self._evaluating:
                await self._sync()
            else:
                await self._synchronizer.resume_after_update()
            synced = clock()
            metrics = self._measure(groups, batch, staleness, taken) | metrics
            metrics |= {
                "time/wait_s": taken - begun - evaluated_s,
                "time/evaluate_s": evaluated_s,
                "time/train_s": trained - taken,
                "time/sync_s": synced - trained,
                **self._saver.metrics(),
            }
            self._observer.step_done(self.step, metrics, groups)
            self._ledger.flush()
            if self._saver.due(self.step):
                await self._checkpoint()
            await self._begin_evaluation()
        if not self._stopping:
            await self._checkpoint(beside=False)
            if self.step == self._settings.steps:
                await self._evaluated()

    async def _sync(self) -> None:
        self._wait(SYNC, f"the sync of version {self.step}")
        if self._check is not None:
            await asyncio.wait({self._check}, timeout=CHECK_TIMEOUT_S)
        await self._synchronizer.sync_weights(self.step)
        self._sync_due = False
        if self.step < self._settings.steps:  # otherwise no new group should start
            self._admission.release_trained()
            self._begin_check(self._trained)

    def _begin_check(self, groups: Sequence[Group]) -> None:
        if self._check_weights is not None:
            check = self._check_weights(groups, self.step)
            self._check = self._start(f"weight check {self.step}", lambda: check)
            self._rollouts.add(self._check)
            self._check.add_done_callback(self._rollouts.discard)

    # --- evaluation ---

    @property
    def _evaluating(self) -> bool:
        return self._evaluation is not None and not self._evaluation.done()

    async def _begin_evaluation(self) -> None:
        """Start an evaluation if one is due and the engines have the trainer's weights."""
        evaluations, synced = self._evaluations, self._synchronizer.version == self.step
        if evaluations and synced and not self._evaluating and evaluations.due(self.step):
            if evaluations.saves:
                await self._checkpoint(beside=False)  # it may become the best one
            self._evaluation = self._start(f"evaluation {self.step}", self._evaluate, self.step)
            self._rollouts.add(self._evaluation)
            self._evaluation.add_done_callback(self._rollouts.discard)

    async def _evaluate(self, step: int) -> None:
        assert self._evaluations is not None
        await self._evaluations.run(step)
        self._stop_requested |= self._evaluations.enough
        self._changed.notify_all()

    async def _evaluated(self) -> float:
        """Wait for the evaluation that is running, if there is one; return the seconds."""
        if self._evaluation is None or self._evaluation.done():
            return 0.0
        clock = asyncio.get_running_loop().time
        self._wait(EVALUATION, "the evaluation")
        begun = clock()
        await asyncio.wait({self._evaluation})
        return clock() - begun

    async def _checkpoint(self, beside: bool = True) -> None:
        """Save this step. With `beside`, training continues while the files are written."""
        self._wait(CHECKPOINT, f"the checkpoint of step {self.step}")
        if saving := await self._saver.save(self.step, beside):
            self._start(f"checkpoint {self.step}", _wait_for, saving)

    async def _take(self) -> list[Group] | None:
        """Take the oldest groups in order of admission, which bounds staleness; None: stop."""
        count = self._settings.groups_per_step
        self._taking = True
        while not self._stop_requested and not self._stopping:
            if self._sync_due and not self._evaluating:
                await self._sync()
                await self._begin_evaluation()
                self._timeline.enter(GROUPS)
            wanted = self._admission.oldest(count)
            groups: list[Group] | None = None
            if len(wanted) == count:
                groups = self._client.get_samples(
                    count, current_param_version=self.step, keys=wanted
                )
            if groups is not None:
                self._taking = False
                self._admission.take(wanted)
                for seq in wanted:
                    self._timeline.group("group", seq, "trained")
                return groups
            missing = list(islice((seq for seq in wanted if seq not in self._queue), 6))
            self.waiting_for["train"] = (
                f"groups {missing[:5]}{'…' if len(missing) > 5 else ''} to be generated and scored"
            )
            await self._changed.wait()
        return None

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

    # --- groups ---

    def _group_failed(self, seq: int, error: PacelineError) -> None:
        self._failed += 1
        reason = "reward_failed" if isinstance(error, RewardError) else "rollout_failed"
        self._drop(seq, reason, str(error))
        log.warning("group %d failed and is dropped: %s", seq, error)
        limit = self._settings.max_failed_groups
        if self._failed > limit:
            error.add_note(f"{self._failed} group(s) failed; rollout.max_failed_groups = {limit}")
            raise error

    def _filtered(self, group: Group) -> None:
        """Drop a group with equal rewards, which has no advantage; another one replaces it."""
        self._drop(group.seq, "equal_rewards", group=group)
        self._uniform[group.trajectories[0].total_reward] += 1
        if self._uniform.total() > FILTERED_IN_A_ROW * self._settings.groups_per_step:
            seen = ", ".join(
                f"{count} with reward {reward:g}" for reward, count in self._uniform.most_common(5)
            )
            raise RolloutError(
                f"{self._uniform.total()} groups in a row had equal rewards ({seen}), so dynamic "
                f"sampling cannot fill step {self.step + 1}: the task is too hard or too easy, or "
                "the reward does not distinguish completions"
            )

    async def _skip(self, groups: Sequence[Group], error: NonFiniteError) -> None:
        """Drop the groups of a skipped update. The step is made with the next groups."""
        for group in groups:
            self._drop(group.seq, UPDATE_SKIPPED, f"step {self.step + 1}", group)
        self._ledger.flush()
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self._settings.max_skipped_updates:
            raise too_many(error, self._skipped_in_a_row) from error
        log.warning("%s", error)
        # An engine that alternates with the trainer may have freed its weights until a sync.
        self._sync_due |= self._settings.takes_turns
        if self._sync_due and not self._evaluating:
            await self._sync()
        else:
            await self._synchronizer.resume_after_update()

    def _dropped(self, item: Item, reason: DropReason) -> None:
        if reason is DropReason.FUTURE:
            raise LedgerError(
                f"group {item.key} has version {item.param_version}, newer than the trainer's "
                f"{self.step}"
            )
        self._drop(int(item.key), reason.value, group=item.payload)

    def _drop(self, seq: int, reason: str, details: str = "", group: Group | None = None) -> None:
        """Drop a group. `group`: if it was generated."""
        self._ledger.drop(seq, reason, details)
        if group is not None:
            self._seen("dropped", group)
        self._admission.drop(seq)
        self._timeline.dropped(seq, reason, group.num_tokens if group is not None else 0)

    def _wait(self, phase: str, what: str) -> None:
        """Begin a phase of the train task, which waits for `what`."""
        self.waiting_for["train"] = what
        self._timeline.enter(phase)

    def _measure(
        self, groups: Sequence[Group], batch: Batch, staleness: Sequence[int], taken_s: float
    ) -> Metrics:
        return {
            "wall_time_s": time.time(),
            **measure_staleness(groups, staleness, taken_s),
            "queue/utilization": self._queue.utilization,
            "queue/dropped": float(self._queue.counts.dropped),
            "rollout/failed_groups": float(self._failed),
            "train/skipped_groups": float(self._ledger.dropped[UPDATE_SKIPPED]),
            **self._fleet.metrics(),
            **measure(groups, batch),
        }

    # --- supervision ---

    def _start(
        self, name: str, work: Callable[..., Awaitable[None]], *args: Any
    ) -> asyncio.Task[None]:
        return self._tasks.create_task(self._supervised(name, work, *args), name=name)

    async def _supervised(
        self, name: str, work: Callable[..., Awaitable[None]], *args: Any
    ) -> None:
        try:
            await work(*args)
        except asyncio.CancelledError:
            if self._stopping:
                raise
            self._stopping = True
            raise WorkerDied(
                f"task {name!r} was cancelled unexpectedly; the run cannot continue"
            ) from None
        except BaseException:
            self._stopping = True  # further cancellations are a consequence
            raise

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
        return Progress((self.step, self._rollouter.finished, self._rollouter.paused), tokens)

    def _patience(self) -> tuple[Patience, Patience]:
        """Return the limits without a sign of life, and without a group while tokens are made."""
        settings = self._settings
        quiet = Patience(settings.stall_timeout_s, "stall_timeout_s")
        step = Patience(settings.step_timeout_s, "step_timeout_s")
        episode = Patience(settings.episode_timeout_s, "rollout.episode_timeout_s")
        if not self._taking:  # a train step, weight sync or checkpoint is running
            return max(quiet, step), max(quiet, step, episode)
        return quiet, max(quiet, episode)


async def _wait_for(future: asyncio.Future[None]) -> None:
    await asyncio.shield(future)  # cancelling the guard must not cancel the future
