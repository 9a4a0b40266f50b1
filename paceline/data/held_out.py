"""Settings of evaluation during training: which prompts, how often, and what follows from it."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from paceline.data.prompts import DataSettings
from paceline.data.tasks import get_task
from paceline.plugins import Plugin
from paceline.settings import Settings

TASK_PROMPTS = 256  # of a built-in task, if evaluation.limit is not set
SEED_OFFSET = 1_000_003  # so that a task gives other prompts than in training


class EvaluationSettings(Settings):
    task: str | None = None
    """Built-in task whose prompts are held out. Set one of task, path and source to evaluate during
    training; other settings of the data are those of the section data."""
    path: str | tuple[str, ...] | None = None
    """Files with held-out prompts, as data.path."""
    source: Plugin | None = None
    """Custom source of held-out rows, as data.source. It must end, or limit must be set."""
    prompt_key: str | None = None
    """Column with the prompt. Default: data.prompt_key."""
    answer_key: str | None = None
    """Column with the reference answer. Default: data.answer_key."""
    limit: int | None = Field(None, ge=1)
    """Number of rows to use, from the first. Default: all rows; 256 for a task."""
    every: int = Field(20, ge=1)
    """Train steps between evaluations. The first and the last version are evaluated as well."""
    samples: int = Field(1, ge=1)
    """Completions per prompt. With several, pass@k is the chance that one of k is solved."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature. Default: 0 (greedy) for one sample, rollout.temperature for several."""
    solved_at: float = 1.0
    """Reward from which a completion counts as solved."""
    keep_best: bool = True
    """Save a checkpoint of every evaluated version and keep that with the best mean reward, as
    checkpoints/best."""
    patience: int = Field(0, ge=0)
    """End the run after this many evaluations in a row without a better mean reward. 0: never."""
    target: float | None = None
    """End the run when the mean reward reaches this value."""

    @field_validator("task")
    @classmethod
    def _known_task(cls, spec: str | None) -> str | None:
        return spec if spec is None else get_task(spec).spec

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        self.data(DataSettings())  # raises if several are set
        return self

    @property
    def has_data(self) -> bool:
        return (self.task, self.path, self.source) != (None, None, None)

    def data(self, training: DataSettings) -> DataSettings:
        """Return the settings of the held-out prompts: every row once, in order."""
        own = {
            "task": self.task,
            "path": self.path,
            "source": self.source,
            "limit": self.limit or (TASK_PROMPTS if self.task else None),
            "prompt_key": self.prompt_key or training.prompt_key,
            "answer_key": self.answer_key or training.answer_key,
            "shuffle": False,
            "curriculum": None,
        }
        return DataSettings.model_validate(training.model_dump() | own)
