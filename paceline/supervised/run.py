"""Supervised fine-tuning from a configuration: the rows of each step go to the actor, which is the
same as in reinforcement learning.

Waits for: the actor, at most step_timeout_s per call.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import NonFiniteError, StalledError
from paceline.model.loading import TokenizerFiles
from paceline.observe.health import Health
from paceline.observe.model_card import card_text, data_name, write_model_card
from paceline.observe.recorder import write_json
from paceline.observe.sinks import open_sinks
from paceline.progress import stage
from paceline.remote.peak import peak_memory
from paceline.remote.worker import Worker
from paceline.run_dir import Start, explain_disk_errors, finished_summary, set_later_aside
from paceline.start import begin_files, open_run_dir, plan_start
from paceline.supervised.config import SftConfig
from paceline.supervised.inputs import Rows, SftInputs, load_sft_inputs
from paceline.supervised.recorder import SUMMARY, LossObserver, LossRecorder
from paceline.suspend import ignore_suspended_time
from paceline.training.checkpoint import read_state, save_checkpoint
from paceline.training.lineage import begin_attempt
from paceline.training.manifest import reading_state
from paceline.training.saving import END_TIMEOUT_S, Saver
from paceline.training.skipped import SkippedUpdates, too_many
from paceline.types import Batch, Role
from paceline.workers.pools import open_workers

log = logging.getLogger(__name__)

ROLES = [Role.ACTOR]


async def fine_tune(
    config: SftConfig,
    make_display: Callable[[int, int], LossObserver | None] | None = None,
    *,
    fresh: bool = False,
    rows: Rows | None = None,
    validation: Rows | None = None,
    stop: asyncio.Event | None = None,
    start_from: str | None = None,
) -> dict[str, Any]:
    """Run to the last step and return the summary.

    `make_display(first_step, steps)` makes the observer of every step. With `fresh`, an earlier run
    in the run directory is moved aside once everything else is known to be valid. `rows` and
    `validation` (held-out rows) replace those of the settings. `stop` ends the run after the
    current step, with a checkpoint. `start_from` is an earlier step of the run, or the checkpoint
    of another run; by default a run resumes from its last checkpoint.
    """
    ignore_suspended_time(asyncio.get_running_loop())
    inputs = load_sft_inputs(config, rows, validation)
    run_dir = Path(config.run_dir)
    workers = config.worker_config(inputs.steps)
    layout = await plan_start(workers, inputs.model_path, fresh, start_from, ROLES)
    given, config = config, config.with_choices(layout.config)
    inputs = inputs.with_config(config)
    async with AsyncExitStack() as stack:
        stack.enter_context(explain_disk_errors(run_dir))
        start = await open_run_dir(
            stack, layout.config, inputs.identity, fresh, start_from, supervised=True
        )
        if start.step >= inputs.steps and (
            finished := finished_summary(run_dir, start.step, SUMMARY)
        ):
            return finished
        choices = (choice for choice in layout.choices if _concerns(config, choice.name))
        begin_files(stack, run_dir, choices, inputs.identity["config"])
        _, _, started = await open_workers(
            stack, layout.config, ROLES, inputs.model_path, run_dir / "logs"
        )
        run = _Run(config, given, inputs, started[Role.ACTOR][0], start)
        await run.restore()
        summary = await run.train(stack, make_display, stop)
        write_json(run_dir / "summary.json", summary)
        return summary


def _concerns(config: SftConfig, name: str) -> bool:
    section, _, last = name.partition(".")
    return hasattr(getattr(config, section, None), last)


class _Run:
    """One supervised run, once its workers have started."""

    def __init__(
        self, config: SftConfig, given: SftConfig, inputs: SftInputs, actor: Worker, start: Start
    ) -> None:
        self._config, self._inputs, self._actor, self._start = config, inputs, actor, start
        self._given = given  # without automatic settings
        self._run_dir = Path(config.run_dir)
        self._validation_first: float | None = None
        self._health = Health()
        self._skipped = SkippedUpdates(
            self._run_dir, config.worker_config(inputs.steps).model_dump(mode="json")
        )
        self._skipped_in_a_row = 0
        self._tokenizer_files = TokenizerFiles(inputs.tokenizer)

    async def restore(self) -> None:
        """Load the checkpoint that the run resumes from, if there is one."""
        if self._start.checkpoint:
            stage(f"loading the checkpoint of step {self._start.step}")
            await self._call("load", str(self._start.checkpoint))
            state = read_state(self._start.checkpoint)
            with reading_state(self._start.checkpoint):
                self._inputs.source.load_state(state["source"])
                self._validation_first = state["validation_first"]

    async def train(
        self,
        stack: AsyncExitStack,
        make_display: Callable[[int, int], LossObserver | None] | None,
        stop: asyncio.Event | None,
    ) -> dict[str, Any]:
        config, inputs, start = self._config, self._inputs, self._start
        self._attempt = begin_attempt(self._run_dir, start.step)
        if start.abandons_later:
            set_later_aside(self._run_dir, start.step)
        display = make_display(start.step, inputs.steps) if make_display else None
        sinks = open_sinks(config.track, self._run_dir, inputs.identity["config"])
        recorder = LossRecorder(self._run_dir, start.metrics_length, display, sinks, start.step)
        stack.callback(recorder.close)
        if inputs.held_out and start.step == 0:
            self._validation_first = await self._validation_loss()
        recorder.validation_first = self._validation_first
        save = partial(self._save, recorder)
        saver = Saver(save, config.save_every, config.save_every_s, start.step)
        try:
            await self._steps(saver, recorder, stop or asyncio.Event())
        except asyncio.CancelledError:
            await saver.end(0.0)
            raise
        except BaseException:
            await saver.end(END_TIMEOUT_S)
            raise
        memory = peak_memory() + await self._actor.peak_memory()
        summary = recorder.summary(memory)
        recorder.log_summary(summary)
        return summary

    async def _steps(self, saver: Saver, recorder: LossRecorder, stop: asyncio.Event) -> None:
        config, inputs, step = self._config, self._inputs, self._start.step
        while step < inputs.steps and not stop.is_set():
            metrics = await self._step(step) | saver.metrics()
            saver.check()
            step += 1
            recorder.step_done(step, metrics)
            inputs.source.forget(step * config.rows_per_step - 1)
            if saver.due(step) and step < inputs.steps:
                await saver.save(step)
        await saver.save(step, beside=False)

    async def _step(self, step: int) -> dict[str, float]:
        config, inputs = self._config, self._inputs
        begun = time.perf_counter()
        batch = inputs.batch(config, step)
        metrics: dict[str, float] = await self._call("fit", batch, step)
        self._check_skipped(batch, step, metrics)
        self._health.check(metrics, step)
        trained = time.perf_counter()
        metrics |= {
            "wall_time_s": time.time(),
            "train/perplexity": _perplexity(metrics["train/loss"]),
            "data/rows": float(batch.num_rows),
            "data/tokens": float(batch.num_tokens),
            "time/train_s": trained - begun,
        }
        done, last = step + 1, inputs.steps
        if inputs.held_out and (done % config.validation.every == 0 or done == last):
            loss = await self._validation_loss()
            metrics |= {
                "validation/loss": loss,
                "validation/perplexity": _perplexity(loss),
                "time/validation_s": time.perf_counter() - trained,
            }
        return metrics

    def _check_skipped(self, batch: Batch, step: int, metrics: dict[str, float]) -> None:
        try:
            self._skipped.check(batch, step, metrics)
            self._skipped_in_a_row = 0
        except NonFiniteError as error:
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row >= self._config.train.max_skipped_updates:
                raise too_many(error, self._skipped_in_a_row) from error
            log.warning("%s", error)

    async def _validation_loss(self) -> float:
        """Return the mean negative log-likelihood of the trained tokens of all held-out rows."""
        total, tokens = 0.0, 0
        for batch in self._inputs.validation_batches(self._config):
            logprobs = await self._call("logprobs", batch)
            total -= float(logprobs[batch.mask].sum(dtype="float64"))
            tokens += int(batch.mask.sum())
        return total / tokens

    async def _call(self, method: str, *args: Any) -> Any:
        limit = self._config.step_timeout_s
        try:
            async with asyncio.timeout(limit) as deadline:
                return await self._actor.call(Role.ACTOR, method, *args)
        except TimeoutError:
            if not deadline.expired():  # an error of the worker
                raise
            raise StalledError(
                f"worker {self._actor.name!r} has not finished {method!r} within step_timeout_s = "
                f"{limit:g} s"
            ) from None

    def _save(
        self, recorder: LossRecorder, step: int, copied: Callable[[], None] | None
    ) -> Coroutine[Any, Any, Path]:
        """Return what saves a checkpoint. With `copied`, call it when training may continue."""
        config, inputs = self._config, self._inputs
        card = _model_card(config, self._given, step, recorder.loss)

        async def write(target: Path) -> None:
            if copied is None:
                await self._actor.call(Role.ACTOR, "save", str(target))
            else:
                await self._actor.call(Role.ACTOR, "snapshot", str(target))
                copied()
                await self._actor.call(Role.ACTOR, "written")
            # Together with these files the directory is an ordinary Hugging Face model.
            self._tokenizer_files.write(target / Role.ACTOR)
            inputs.generation.to_json_file(target / Role.ACTOR / "generation_config.json")
            write_model_card(target / Role.ACTOR, card)

        state = {
            "step": step,
            "attempt": self._attempt,
            "metrics_length": recorder.length,
            "source": inputs.source.state(),
            "validation_first": self._validation_first,
            **inputs.identity,
        }
        root = self._run_dir / "checkpoints"
        return save_checkpoint(root, step, state, write, config.keep_checkpoints)


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _model_card(config: SftConfig, given: SftConfig, step: int, loss: float | None) -> str:
    facts = {
        "Train steps": str(step),
        "Loss": "unknown" if loss is None else f"{loss:.4g}",
        "Data": data_name(config.data),
        "Rows per step": str(config.rows_per_step),
        "Learning rate": f"{config.train.learning_rate:g}",
    }
    return card_text(config, given, "supervised fine-tuning", facts, ("sft",))
