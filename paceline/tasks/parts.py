"""What the loop is given: its settings, and the parts that others may replace."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.config import RunConfig
from paceline.errors import StalledError
from paceline.queue.admission import Admission
from paceline.queue.ledger import Ledger
from paceline.queue.message_queue import MessageQueueClient
from paceline.rollout.engine import EngineStats
from paceline.rollout.fleet import Fleet
from paceline.rollout.rollouter import Rollouter
from paceline.settings import Settings
from paceline.synchronizer import ParameterSynchronizer
from paceline.timeline import Timeline
from paceline.training.saving import Save
from paceline.types import Batch, Group, Prompt

Metrics = dict[str, float]
# Starts a check that the engines have a version's weights.
CheckWeights = Callable[[Sequence[Group], int], Awaitable[None]]


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

    @classmethod
    def of(cls, config: RunConfig) -> "LoopSettings":
        return cls(
            steps=config.steps,
            groups_per_step=config.groups_per_step,
            sync_every=config.schedule.sync_every,
            save_every=config.save_every,
            save_every_s=config.save_every_s,
            max_failed_groups=config.rollout.max_failed_groups,
            max_skipped_updates=config.train.max_skipped_updates,
            dynamic_sampling=config.algorithm.dynamic_sampling,
            stall_timeout_s=config.stall_timeout_s,
            episode_timeout_s=config.rollout.episode_limit_s,
            step_timeout_s=config.step_timeout_s,
            takes_turns=config.takes_turns,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run gives to its loop, which shares it with its tasks."""

    settings: LoopSettings
    source: Source
    rollouter: Rollouter
    fleet: Fleet
    queue: MessageQueueClient
    admission: Admission
    ledger: Ledger
    trainer: StepTrainer
    synchronizer: ParameterSynchronizer
    observer: Observer
    save: Save
    guards: Sequence[tuple[str, asyncio.Future[None]]] = ()  # worker and its death
    check_weights: CheckWeights | None = None
    evaluations: Evaluations | None = None
    # Turns the description of a stall into the error; it may block for some seconds.
    report_stall: Callable[[str], StalledError] | None = None
    timeline: Timeline = field(default_factory=Timeline)

    def seen(self, kind: str, group: Group) -> None:
        """Tell the observer of a group that was generated, or dropped later; some do not ask."""
        if group_seen := getattr(self.observer, "group_seen", None):
            group_seen(kind, group)
