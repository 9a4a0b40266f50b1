"""The train task: takes groups, makes steps, publishes weights, and starts evaluations, weight
checks and checkpoints.

Waits for: the groups of the next step, and each worker that a step needs.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from itertools import islice

from paceline.errors import NonFiniteError
from paceline.group_metrics import measure, measure_staleness
from paceline.tasks.groups import GroupAccounts
from paceline.tasks.parts import Evaluations, Metrics, Parts
from paceline.tasks.supervised import Tasks
from paceline.timeline import CHECKPOINT, EVALUATION, GROUPS, PAUSE, SYNC, TRAIN
from paceline.training.assembly import assemble
from paceline.training.saving import Saver
from paceline.training.skipped import too_many
from paceline.types import Group
from paceline.watchdog import Waits

log = logging.getLogger(__name__)

# For a weight check, which ends when the engines get newer weights.
CHECK_TIMEOUT_S = 5.0


class TrainTask:
    def __init__(
        self, parts: Parts, tasks: Tasks, accounts: GroupAccounts, waiting_for: Waits
    ) -> None:
        self.step = 0  # number of completed steps; also the trainer's policy version
        self.taking = False  # it waits for groups
        self._parts = parts
        self._settings, self._timeline = parts.settings, parts.timeline
        self._queue, self._synchronizer = parts.queue.queue, parts.synchronizer
        self._tasks, self._accounts, self._waiting_for = tasks, accounts, waiting_for
        self._check: asyncio.Task[None] | None = None  # of the last version
        self._evaluation: asyncio.Task[None] | None = None
        self._sync_due = False  # but an evaluation needs the engines' weights
        self._trained: Sequence[Group] = ()  # in the last step
        self._skipped_in_a_row = 0  # train steps whose update was skipped
        self._stop_requested = False

    def begin(self, first_step: int) -> None:
        """Prepare the run, which starts after `first_step`."""
        settings, self.step = self._settings, first_step
        self._timeline.enter(GROUPS)
        self.saver = Saver(self._parts.save, settings.save_every, settings.save_every_s, first_step)
        self._queue.set_version(first_step)

    def stop(self) -> None:
        """End the run after the current step, with a checkpoint."""
        self._stop_requested = True
        self._queue.changed.notify_all()

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        await self._begin_evaluation()
        while self.step < self._settings.steps and not self._tasks.stopping:
            begun = clock()
            self._timeline.enter(GROUPS)
            groups = await self._take()
            if groups is None:
                break
            evaluated_s = await self._evaluated() if self._settings.takes_turns else 0.0
            self._wait(PAUSE, "running generations to pause")
            await self._synchronizer.pause_before_update()
            if await self._train(groups, begun, evaluated_s):
                if self.saver.due(self.step):
                    await self._checkpoint()
                await self._begin_evaluation()
        if not self._tasks.stopping:
            await self._checkpoint(beside=False)
            if self.step == self._settings.steps:
                await self._evaluated()

    async def _take(self) -> list[Group] | None:
        """Take the oldest groups in order of admission, which bounds staleness; None: stop."""
        count = self._settings.groups_per_step
        while not self._stop_requested and not self._tasks.stopping:
            if self._sync_due and not self._evaluating:
                await self._sync()
                await self._begin_evaluation()
                self._timeline.enter(GROUPS)
            wanted = self._parts.admission.oldest(count)
            groups: list[Group] | None = None
            if len(wanted) == count:
                groups = self._parts.queue.get_samples(
                    count, current_param_version=self.step, keys=wanted
                )
            if groups is not None:
                self._parts.admission.take(wanted)
                for seq in wanted:
                    self._timeline.group("group", seq, "trained")
                return groups
            missing = list(islice((seq for seq in wanted if seq not in self._queue), 6))
            self._waiting_for["train"] = (
                f"groups {missing[:5]}{'…' if len(missing) > 5 else ''} to be generated and scored"
            )
            self.taking = True
            try:
                await self._queue.changed.wait()
            finally:
                self.taking = False
        return None

    async def _train(self, groups: Sequence[Group], begun: float, evaluated_s: float) -> bool:
        """Make a step, for whose groups it has waited since `begun`; return False if it is skipped.

        `evaluated_s`: seconds of that time in which it waited for an evaluation.
        """
        clock = asyncio.get_running_loop().time
        taken = clock()
        batch = assemble(groups)
        staleness = [self.step - group.version_min for group in groups]
        self._wait(TRAIN, f"train step {self.step + 1}")
        try:
            metrics = await self._parts.trainer.step(batch, self.step)
        except NonFiniteError as error:
            await self._skip(groups, error)
            return False
        self._skipped_in_a_row = 0
        self._accounts.trained(groups, staleness, self.step)
        self._parts.source.observe(groups)
        self.step += 1
        self._queue.set_version(self.step)
        trained, self._trained = clock(), groups
        last = self.step == self._settings.steps
        self._sync_due |= last or self.step % self._settings.sync_every == 0
        waited_s = await self._evaluated() if last else 0.0
        await self._sync_or_resume()
        synced = clock()
        measured = {
            "wall_time_s": time.time(),
            **measure_staleness(groups, staleness, taken),
            **self._measure(),
            **measure(groups, batch),
        }
        times = {
            "time/wait_s": taken - begun - evaluated_s,
            "time/evaluate_s": evaluated_s + waited_s,
            "time/train_s": trained - taken,
            "time/sync_s": synced - trained - waited_s,
        }
        metrics = measured | metrics | times | self.saver.metrics()
        self._parts.observer.step_done(self.step, metrics, groups)
        self._parts.ledger.flush()
        return True

    def _measure(self) -> Metrics:
        return {
            "queue/utilization": self._queue.utilization,
            "queue/dropped": float(self._queue.counts.dropped),
            "rollout/failed_groups": float(self._accounts.failed),
            "train/skipped_groups": float(self._accounts.skipped),
            **self._parts.fleet.metrics(),
        }

    async def _skip(self, groups: Sequence[Group], error: NonFiniteError) -> None:
        """Drop the groups of a skipped update. The step is made with the next groups."""
        self._accounts.drop_skipped(groups, self.step + 1)
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self._settings.max_skipped_updates:
            raise too_many(error, self._skipped_in_a_row) from error
        log.warning("%s", error)
        # An engine that alternates with the trainer may have freed its weights until a sync.
        self._sync_due |= self._settings.takes_turns
        await self._sync_or_resume()

    # --- weights ---

    async def _sync_or_resume(self) -> None:
        """Publish the weights if that is due, and let generation continue."""
        if self._sync_due and not self._evaluating:
            await self._sync()
        else:
            await self._synchronizer.resume_after_update()

    async def _sync(self) -> None:
        self._wait(SYNC, f"the sync of version {self.step}")
        if self._check is not None:
            await asyncio.wait({self._check}, timeout=CHECK_TIMEOUT_S)
        await self._synchronizer.sync_weights(self.step)
        self._sync_due = False
        if self.step < self._settings.steps:  # otherwise no new group should start
            self._parts.admission.release_trained()
            self._begin_check(self._trained)

    def _begin_check(self, groups: Sequence[Group]) -> None:
        if self._parts.check_weights is not None:
            check = self._parts.check_weights(groups, self.step)
            self._check = self._tasks.start_beside(f"weight check {self.step}", lambda: check)

    async def _checkpoint(self, beside: bool = True) -> None:
        """Save this step. With `beside`, training continues while the files are written."""
        self._wait(CHECKPOINT, f"the checkpoint of step {self.step}")
        if saving := await self.saver.save(self.step, beside):
            self._tasks.start(f"checkpoint {self.step}", asyncio.shield, saving)

    # --- evaluation ---

    @property
    def _evaluating(self) -> bool:
        return self._evaluation is not None and not self._evaluation.done()

    async def _begin_evaluation(self) -> None:
        """Start an evaluation if one is due and the engines have the trainer's weights."""
        evaluations, synced = self._parts.evaluations, self._synchronizer.version == self.step
        if evaluations and synced and not self._evaluating and evaluations.due(self.step):
            if evaluations.saves:
                await self._checkpoint(beside=False)  # it may become the best one
            self._evaluation = self._tasks.start_beside(
                f"evaluation {self.step}", self._evaluate, evaluations, self.step
            )

    async def _evaluate(self, evaluations: Evaluations, step: int) -> None:
        await evaluations.run(step)
        self._stop_requested |= evaluations.enough
        self._queue.changed.notify_all()

    async def _evaluated(self) -> float:
        """Wait for the evaluation that is running, if there is one; return the seconds."""
        if self._evaluation is None or self._evaluation.done():
            return 0.0
        clock = asyncio.get_running_loop().time
        self._wait(EVALUATION, "the evaluation")
        begun = clock()
        await asyncio.wait({self._evaluation})
        return clock() - begun

    def _wait(self, phase: str, what: str) -> None:
        """Begin a phase of the train task, which waits for `what`."""
        self._waiting_for["train"] = what
        self._timeline.enter(phase)
