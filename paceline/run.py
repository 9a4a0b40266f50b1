"""Training from a configuration: builds the parts in order, runs the loop, writes the run
directory.

Everything that can be rejected is rejected before the first worker starts.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from paceline.config import RunConfig, check_trainable
from paceline.control import Command, Control
from paceline.generation import (
    Generation,
    open_agent,
    open_generation,
    open_scorer,
    start_agent,
)
from paceline.held_out import HeldOut
from paceline.inputs import Inputs, load_inputs
from paceline.loop import Loop, LoopSettings, Observer, Parts
from paceline.model.loading import TokenizerFiles
from paceline.observe.collapse import CollapseMonitor
from paceline.observe.drift import DriftMonitor
from paceline.observe.health import Health
from paceline.observe.mismatch import MismatchMonitor
from paceline.observe.model_card import model_card, write_model_card
from paceline.observe.recorder import SUMMARY, Recorder, write_json
from paceline.observe.recording import Recording
from paceline.progress import stage
from paceline.queue.admission import Admission
from paceline.queue.ledger import Ledger
from paceline.queue.message_queue import MessageQueue, MessageQueueClient
from paceline.remote.peak import peak_memory
from paceline.remote.worker import Worker
from paceline.reward.reward import Rewards
from paceline.rollout.environment import MakeEnvironment
from paceline.rollout.fleet import Fleet
from paceline.rollout.rollouter import Rollouter
from paceline.run_dir import Start, explain_disk_errors, finished_summary, set_later_aside
from paceline.simulator.prediction import PredictionCheck, read_prediction
from paceline.start import begin_files, open_run_dir, plan_start
from paceline.suspend import ignore_suspended_time
from paceline.synchronizer import ParameterSynchronizer
from paceline.training.checkpoint import read_state, save_checkpoint
from paceline.training.lineage import begin_attempt
from paceline.training.manifest import reading_state
from paceline.training.skipped import SkippedUpdates
from paceline.training.trainer import Trainer
from paceline.types import Group, Role
from paceline.watchdog import Patience, Watchdog
from paceline.weight_check import WeightCheck
from paceline.workers.pools import training_roles, unique_workers
from paceline.workers.transport import open_transport

log = logging.getLogger(__name__)

T = TypeVar("T")
FINAL_STATS_TIMEOUT_S = 10.0  # for workers to report their final statistics


async def train(
    config: RunConfig,
    make_display: Callable[[int], Observer] | None = None,
    *,
    fresh: bool = False,
    reward: Rewards | None = None,
    environment: MakeEnvironment | None = None,
    rows: Iterable[Mapping[str, Any]] | None = None,
    held_out: Iterable[Mapping[str, Any]] | None = None,
    stop: asyncio.Event | None = None,
    start_from: str | None = None,
) -> dict[str, Any]:
    """Run to the last step and return the summary.

    `make_display(first_step)` makes the observer of every step. With `fresh`, an earlier run in the
    run directory is moved aside once everything else is known to be valid. `reward` (a function of
    completion and row, async or not), `environment` (made for the tokenizer), `rows` (prompts) and
    `held_out` (prompts of evaluations) replace those of the settings. `stop` ends the run after the
    current step, with a checkpoint. `start_from` is an earlier step of the run, or the checkpoint
    of another run; by default a run resumes from its last checkpoint.
    """
    ignore_suspended_time(asyncio.get_running_loop())
    check_trainable(config)
    prediction = _prediction_check(config)
    inputs = load_inputs(config, rows, held_out)
    agent = open_agent(config, inputs, environment)
    run_dir = Path(config.run_dir)
    layout = await plan_start(config, inputs.model_path, fresh, start_from)
    given, config = config, layout.config
    inputs = inputs.with_config(config)
    _freeze_libraries()
    async with AsyncExitStack() as stack:
        stack.enter_context(explain_disk_errors(run_dir))
        await start_agent(stack, config, agent)
        scorer = await open_scorer(stack, config, inputs, reward, agent, run_dir)
        start = await open_run_dir(stack, config, inputs.identity, fresh, start_from)
        if start.step >= config.steps and (
            finished := finished_summary(run_dir, start.step, SUMMARY)
        ):
            return finished
        begin_files(stack, run_dir, layout.choices, inputs.identity["config"])
        control = await stack.enter_async_context(Control(run_dir))
        generation = await open_generation(
            stack,
            config,
            training_roles(config),
            inputs,
            agent,
            scorer,
            run_dir / "logs",
            run_dir / "quarantine.jsonl",
        )
        run = _Run(config, given, inputs, generation, start, prediction)
        stack.enter_context(run.watchdog)
        await run.prepare()
        summary = await run.train(stack, control, make_display, stop)
        if summary["memory_phases"]:
            summary["memory_planned"] = layout.actor_memory()
        write_json(run_dir / "summary.json", summary)
        return summary


@cache
def _freeze_libraries() -> None:
    """Let collections skip what the libraries hold, which takes tenths of a second.

    Frozen objects are never freed: so only once in a program, and before the run has models.
    """
    if not gc.get_freeze_count():
        gc.freeze()


class _Run:
    """One training run, once its workers have started."""

    def __init__(
        self,
        config: RunConfig,
        given: RunConfig,
        inputs: Inputs,
        generation: Generation,
        start: Start,
        prediction: PredictionCheck | None,
    ) -> None:
        self._config, self._inputs, self._start = config, inputs, start
        self._given = given  # without automatic settings
        self._prediction = prediction
        self._generation = generation
        self._workers, self._fleet = generation.workers, generation.fleet
        self._rollouter, self._scorer = generation.rollouter, generation.scorer
        self._run_dir = Path(config.run_dir)
        self.watchdog = Watchdog(
            generation.living_workers,
            config.stall_timeout_s,
            self._run_dir / "logs",
            generation.user_processes,
        )
        self._tokenizer_files = TokenizerFiles(inputs.tokenizer)
        collapse = CollapseMonitor()
        self._trainer = Trainer(
            self._workers[Role.ACTOR][0],
            config.algorithm,
            config.step_timeout_s,
            next(iter(self._workers[Role.CRITIC]), None),
            next(iter(self._workers[Role.REF]), None),
            config.rollout.max_response_length,
            # The mismatch check compares a step with the steps before it, so it comes first.
            monitors=[
                Health(),
                MismatchMonitor(config.mismatch_limit, collapse),
                collapse,
                DriftMonitor(),
            ],
            skipped=SkippedUpdates(self._run_dir, inputs.identity["config"]),
        )

    async def prepare(self) -> None:
        """Restore the checkpoint and load its weights into the engines, to test the transport."""
        config = self._config
        within = partial(self.watchdog.within, Patience(config.start_timeout_s, "start_timeout_s"))
        if self._start.checkpoint:
            stage(f"loading the checkpoint of step {self._start.step}")
            await within("loading the checkpoint", self._restore(self._start.checkpoint))
        stage("connecting the trainer and the engines")
        transport = open_transport(config, self._workers)
        self._synchronizer = ParameterSynchronizer(
            await within("connecting the trainer and the engines", transport),
            self._fleet,
            self._rollouter,
            config.schedule.on_sync,
            config.sync,
            # With max_staleness = 0 nothing is generated during a train step.
            config.takes_turns and config.schedule.max_staleness > 0,
        )
        stage("the first weight sync, for which kernels may be compiled")
        await within("the first weight sync", self._synchronizer.sync_weights(self._start.step))

    async def train(
        self,
        stack: AsyncExitStack,
        control: Control,
        make_display: Callable[[int], Observer] | None,
        stop: asyncio.Event | None,
    ) -> dict[str, Any]:
        start, fleet = self._start, self._fleet
        self._attempt = begin_attempt(self._run_dir, start.step)
        # The ledger is truncated to the checkpoint only now: a start that fails changes nothing.
        if start.abandons_later:
            set_later_aside(self._run_dir, start.step)
        ledger = Ledger(self._run_dir / "ledger.jsonl", start.ledger)
        stack.callback(ledger.close)
        display = make_display(start.step) if make_display else None
        recording = Recording(
            self._config,
            self._inputs,
            self._generation,
            start,
            display,
            lambda: self._trainer.advantages,
            self._prediction,
        )
        stack.callback(recording.recorder.close)
        loop = self._loop(ledger, recording)
        self.watchdog.watch(loop.stall_check(time.monotonic()), loop.stalled)
        if stop is not None:
            stopper = asyncio.create_task(_stop_when(stop, loop))
            stack.callback(stopper.cancel)
        commands = job_commands(fleet, self._rollouter)
        async with recording.measuring(), control.serving(commands):
            await loop.run(start.step)
        ledger.flush()  # fails if the directory was moved or deleted after the last step
        return await self._summary(ledger, recording.recorder)

    def _loop(self, ledger: Ledger, recording: Recording) -> Loop:
        config, fleet, recorder = self._config, self._fleet, recording.recorder
        queue = MessageQueue(config.max_queue_size, changed=fleet.changed)
        workers = unique_workers(self._workers)
        self._held_out = self._open_held_out(recorder)
        capacity = config.schedule.capacity(config.groups_per_step)
        parts = Parts(
            settings=LoopSettings.of(config),
            source=self._inputs.source,
            rollouter=self._rollouter,
            fleet=fleet,
            queue=MessageQueueClient(queue, config.schedule.max_staleness),
            admission=Admission(capacity, fleet.changed, config.max_queue_size),
            ledger=ledger,
            trainer=self._trainer,
            synchronizer=self._synchronizer,
            observer=recorder,
            save=partial(self._save, ledger, recorder, queue),
            guards=[
                (worker.name, worker.died) for worker in workers if worker not in fleet.elastic
            ],
            check_weights=_weight_check(config, self._workers[Role.ACTOR][0], fleet),
            evaluations=self._held_out,
            report_stall=self.watchdog.report,
            timeline=recording.timeline,
        )
        return Loop(parts)

    async def _summary(self, ledger: Ledger, recorder: Recorder) -> dict[str, Any]:
        fleet, peak = self._fleet, await self._final_stats(recorder)
        summary = recorder.summary(
            sync_s=self._synchronizer.seconds, ledger=ledger.counts(), memory_peak_bytes=peak
        )
        if self._held_out:
            summary["evaluation"] = self._held_out.summary()
        if self._prediction and (compared := self._prediction.summary()):
            summary["prediction"] = compared
        summary["fleet"] = {"replaced": fleet.replaced, "fenced_messages": fleet.fenced_messages}
        recorder.log_summary(summary)
        return summary

    def _open_held_out(self, recorder: Recorder) -> HeldOut | None:
        config, settings = self._config, self._config.evaluation
        if self._inputs.held_out is None:
            return None
        temperature = settings.temperature
        if temperature is None:
            temperature = config.rollout.temperature if settings.samples > 1 else 0.0
        return HeldOut(
            settings,
            self._inputs.held_out,
            self._rollouter.variant(temperature, settings.samples),
            self._run_dir,
            first_step=self._start.step,
            last_step=config.steps,
            slots=config.slots * len(list(self._fleet)),
            report=recorder.evaluation_done,
            max_failed=config.rollout.max_failed_groups,
        )

    def _save(
        self,
        ledger: Ledger,
        recorder: Recorder,
        queue: MessageQueue,
        step: int,
        copied: Callable[[], None] | None,
    ) -> Coroutine[Any, Any, Path]:
        """Return what saves a checkpoint; ledger and metrics belong to the moment of this call.

        With `copied`, call it when the next step may change the weights.
        """
        inputs, trainer = self._inputs, self._trainer
        evaluation = self._held_out.summary().get("last") if self._held_out else None
        card = model_card(self._config, step, recorder.reward, evaluation, self._given)
        in_flight = self._generation.in_flight(queue) if self._config.keeps_in_flight else {}

        async def write(target: Path) -> None:
            async with self._generation.writing_in_flight(in_flight, step, target):
                if copied is None:
                    await trainer.save(target)
                else:
                    await trainer.snapshot(target)
                    copied()
                    await trainer.written()
            # Together with these files the directory is an ordinary Hugging Face model.
            self._tokenizer_files.write(target / Role.ACTOR)
            inputs.generation.to_json_file(target / Role.ACTOR / "generation_config.json")
            write_model_card(target / Role.ACTOR, card)

        state = {
            "step": step,
            "attempt": self._attempt,
            "ledger": ledger.state().to_json(),
            "metrics_length": recorder.length,
            "source": inputs.source.state(),
            "trainer": trainer.state(),
            **inputs.identity,
        }
        root = self._run_dir / "checkpoints"
        kept, held_out = self._config.keep_checkpoints, self._held_out
        protected = (lambda: held_out.protected) if held_out else tuple
        return save_checkpoint(root, step, state, write, kept, protected)

    async def _restore(self, checkpoint: Path) -> None:
        await self._trainer.load(checkpoint)
        if self._config.keeps_in_flight and self._start.ledger:
            order = self._start.ledger.outstanding
            self._generation.restore_in_flight(self._config, checkpoint, self._start.step, order)
        state = read_state(checkpoint)
        with reading_state(checkpoint):
            self._inputs.source.load_state(state["source"])
            self._trainer.load_state(state["trainer"])

    async def _final_stats(self, recorder: Recorder) -> int:
        """Record the final statistics of the engines; return the peak memory of all processes."""
        members = self._fleet.in_rotation
        recorder.record_final_stats(await _replies([m.engine.stats() for m in members]))
        living = set(unique_workers(self._workers)) - self._fleet.elastic
        living |= {member.engine.worker for member in members}
        workers = sum(await _replies([worker.peak_memory() for worker in living]))
        user_code = sum(process.peak_memory() for process in self._generation.user_processes())
        return peak_memory() + user_code + workers


def job_commands(fleet: Fleet, rollouter: Rollouter) -> dict[str, Command]:
    """Return the commands that a running job accepts, by name."""
    return {
        "list": fleet.describe,
        "add": fleet.add,
        "remove": fleet.remove,
        # Without the parameter `who`: what another name paused, no command could resume.
        "pause": lambda: rollouter.pause_rollout(),
        "resume": lambda: rollouter.resume_rollout(),
    }


async def _replies(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the replies that arrive in time; ignore workers that fail or time out."""
    waiting = (asyncio.wait_for(call, FINAL_STATS_TIMEOUT_S) for call in calls)
    replies = await asyncio.gather(*waiting, return_exceptions=True)
    return [reply for reply in replies if not isinstance(reply, BaseException)]


async def _stop_when(stop: asyncio.Event, loop: Loop) -> None:
    await stop.wait()
    loop.stop()


def _weight_check(
    config: RunConfig, actor: Worker, fleet: Fleet
) -> Callable[[Sequence[Group], int], Coroutine[Any, Any, None]] | None:
    """Return how to check the weights of engines, if it is not done with the trained tokens.

    The native engine copies weights as they are; vLLM fuses, packs and divides them.
    """
    separate = not config.placement.shared(Role.ACTOR, Role.ROLLOUT)
    if config.rollout.engine == "vllm" and config.schedule.max_staleness and separate:
        return WeightCheck(actor, fleet, config.rollout.temperature, config.mismatch_limit).begin
    return None


def _prediction_check(config: RunConfig) -> PredictionCheck | None:
    """Return what compares the run with its prediction, if there is one."""
    if config.prediction is None:
        return None
    prediction = read_prediction(Path(config.prediction))
    return PredictionCheck(prediction, config.schedule.max_staleness)
