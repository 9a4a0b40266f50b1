"""What the loop is given: its settings, and the parts that others may replace."""

from collections.abc import Sequence
from typing import Protocol

from paceline.rollout.engine import EngineStats
from paceline.settings import Settings
from paceline.types import Batch, Group, Prompt

Metrics = dict[str, float]


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
