"""A run that a program or the command line asks for, on its way from configuration to result.

Waits for: the run, which has a separate thread with an event loop (background.py).
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from paceline.background import Background
from paceline.collection import collection_paused
from paceline.config import RunConfig, check_trainable
from paceline.config.base import RunSettings
from paceline.early_checks import check_early, check_given_rows
from paceline.errors import ConfigError
from paceline.line_file import intact_rows
from paceline.loop import Metrics, Observer
from paceline.rollout.engine import EngineStats
from paceline.types import Group, Role

if TYPE_CHECKING:
    from paceline.inputs import Preparing
    from paceline.observe.display import Display
    from paceline.observe.terminal import StartTerminal, Terminal
    from paceline.rollout.environment import MakeEnvironment

log = logging.getLogger(__name__)

RunSettingsT = TypeVar("RunSettingsT", bound=RunSettings)
Rows: TypeAlias = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    run_dir: Path
    summary: dict[str, Any]

    @property
    def checkpoint(self) -> Path:
        """Directory of the trained model, as Hugging Face tools read it."""
        return self.run_dir / "checkpoints" / f"step_{self.summary['steps']:08d}" / Role.ACTOR

    @cached_property
    def metrics(self) -> list[Metrics]:
        """The metrics of each step."""
        return list(intact_rows(self.run_dir / "metrics.jsonl"))


@dataclass(frozen=True, slots=True)
class Step:
    """A completed train step."""

    step: int
    reward: float
    metrics: Metrics
    groups: Sequence[Group]  # the prompts of the step with their completions


@dataclass(frozen=True)
class Job:
    """A configuration, and what a program gives as objects instead of settings."""

    config: RunConfig
    rows: Rows | None = None
    held_out: Rows | None = None
    reward: Any = None  # see run.train
    environment: "MakeEnvironment | None" = None

    def train(
        self,
        fresh: bool = False,
        display: "bool | Terminal" = True,
        watch: Callable[[Step], None] | None = None,
        stop: asyncio.Event | None = None,
        start_from: str | None = None,
    ) -> Background[Run]:
        """Start the run. `watch` is called with every step."""
        config = with_absolute_run_dir(self.config)
        stopping = Stopping(stop or asyncio.Event(), config.grace_s)
        check_start(fresh, start_from)
        check_trainable(config)
        self._check_early(trains=True)
        terminal = _terminal(self.config) if display is True else display or None
        with starting(config, terminal) as closing:
            from paceline.run import train

        def observers(first_step: int) -> Observer:
            stopping.has_begun = True
            return _Observers(
                [terminal.display(first_step)] if terminal else [], watch or (lambda step: None)
            )

        work = partial(
            train,
            config,
            observers,
            fresh=fresh,
            reward=self.reward,
            environment=self.environment,
            rows=self.rows,
            held_out=self.held_out,
            stop=stopping.event,
            start_from=start_from,
        )
        finish = (lambda run: terminal.finish(run.summary)) if terminal else None
        return stopping.in_background(config.run_dir, work, closing, finish)

    def evaluate(
        self,
        samples: int = 1,
        progress: Callable[[int, int], None] | None = None,
        preparing: "Preparing | None" = None,
    ) -> Background[dict[str, Any]]:
        """Start the evaluation. `progress(groups done, all groups)` is called after each group.

        `preparing(name, done, total)` is called while a model is created or converted.
        """
        self._check_early(trains=False)
        quiet_libraries()
        with collection_paused():
            from paceline.evaluation import evaluate, for_evaluation
            from paceline.inputs import prepare_model

        prepare_model(self.config, preparing)
        config = for_evaluation(self.config, samples)
        return Background(evaluate(config, progress, self.reward, self.environment, self.rows))

    def _check_early(self, trains: bool) -> None:
        has_rows, has_reward = self.rows is not None, self.reward is not None
        check_early(self.config, trains=trains, has_rows=has_rows, has_reward=has_reward)
        data = self.config.data
        if self.rows is not None:
            check_given_rows(data, self.rows, "data")
        if self.held_out is not None:
            held_out = self.config.evaluation.data(data)
            check_given_rows(held_out, self.held_out, "evaluation_data", "evaluation")


@dataclass
class Stopping:
    """What Ctrl-C does to a run."""

    event: asyncio.Event  # ends the run after the current step, with a checkpoint
    grace_s: float
    has_begun: bool = False  # there may be something to save
    interrupted: bool = False

    def stop(self) -> bool:
        """Ask the run to end; return whether it will."""
        self.interrupted = True
        self.event.set()
        if self.has_begun:
            log.warning(
                "stopping after the current step, with a checkpoint, within grace_s = %g s; a "
                "second Ctrl-C stops at once",
                self.grace_s,
            )
        return self.has_begun

    def in_background(
        self,
        run_dir: str,
        work: Callable[[], Awaitable[dict[str, Any]]],
        closing: ExitStack,
        finish: Callable[[Run], None] | None,
    ) -> Background[Run]:
        """Start a run; `work` returns its summary, and then `closing` is closed.

        `finish` shows the results of a run that was not interrupted. A run of this program in the
        same directory that is about to end, as after `break`, is waited for.
        """
        with closing:
            Background.wait_for_ending(run_dir)
            closing = closing.pop_all()

        async def run() -> Run:
            with closing:
                ended = Run(Path(run_dir), await work())
                if finish and not self.interrupted:
                    finish(ended)
            return ended

        return Background(run(), self.stop, self.grace_s, run_dir)


class _Observers:
    """The display, if there is one, and the program that watches the run."""

    def __init__(self, others: "Sequence[Display]", watch: Callable[[Step], None]) -> None:
        self._others, self._watch = others, watch

    def step_done(self, step: int, metrics: Metrics, groups: Sequence[Group]) -> None:
        for other in self._others:
            other.step_done(step, metrics, groups)
        self._watch(Step(step, metrics["reward/mean"], metrics, groups))

    def engines_polled(self, engines: Sequence[EngineStats], queue_utilization: float) -> None:
        for other in self._others:
            other.engines_polled(engines, queue_utilization)

    def evaluation_done(self, step: int, scores: Metrics) -> None:
        for other in self._others:
            other.evaluation_done(step, scores)


def with_absolute_run_dir(config: RunSettingsT) -> RunSettingsT:
    """Return the settings of a run that does not depend on the current directory, which the
    program or its reward function may change."""
    return config.model_copy(update={"run_dir": os.path.abspath(config.run_dir)})


def check_start(fresh: bool, start_from: str | None) -> None:
    """Raise ConfigError if a new run would start from an earlier step."""
    if fresh and start_from is not None and start_from.isdigit():
        raise ConfigError(
            f"--fresh contradicts --from {start_from} (in Python: fresh and resume_from): a new "
            "run has no earlier step; leave out one of them"
        )


def _terminal(config: RunConfig) -> "Terminal":
    from paceline.observe.terminal import Terminal

    return Terminal(config)


def quiet_libraries() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@contextmanager
def starting(config: RunConfig, terminal: "StartTerminal | None") -> Iterator[ExitStack]:
    """Show the terminal while the caller imports what it runs, then prepare the model.

    Yield what the run closes at its end. If the start fails, the terminal is closed at once.
    """
    quiet_libraries()
    closing = ExitStack()
    with ExitStack() as stack:
        if terminal:
            stack.enter_context(terminal)
        with collection_paused():
            yield closing
        from paceline.inputs import prepare_model

        prepare_model(config, terminal.preparing if terminal else None)
        if terminal:
            terminal.starting()
        closing.push(stack.pop_all())
