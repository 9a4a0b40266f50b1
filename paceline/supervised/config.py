"""Settings of `paceline sft`: those of a training run that concern data and trainer."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, Field, ValidationError, field_validator, model_validator

from paceline.config import (
    RunConfig,
    apply_setting,
    drop_alternatives,
    parse_setting,
    validated,
)
from paceline.data.examples import ExampleSettings
from paceline.hints import explain
from paceline.placement import PlacementSettings, RaySettings
from paceline.plugins import Plugin
from paceline.recipe import find_recipe, read_recipe
from paceline.settings import Settings, automatic, open_settings, with_settings
from paceline.training.settings import TrainSettings
from paceline.translate.hydra import flatten


class SftTrainSettings(TrainSettings):
    learning_rate: float = Field(1e-5, ge=0)
    """Peak learning rate of AdamW."""
    staleness_kl_target: float = Field(0.0, ge=0, le=0)
    """Not used: supervised data is never stale."""


class SftPlacementSettings(Settings):
    train_ranks: int | None = Field(None, ge=1)
    """Number of processes that train, if train.backend supports several. Default: one for each GPU;
    without GPUs one replica of the model (train.tensor_parallel x train.pipeline_parallel)."""
    threads: int = automatic(0, ge=0)
    """CPU threads per process. auto or 0: the cores of the machine divided by the number of
    processes."""
    min_gpus: int = Field(0, ge=0)
    """Number of GPUs that must be there; with fewer, the run does not start. 0: use the GPUs there
    are, or CPUs."""


class ValidationSettings(Settings):
    path: str | tuple[str, ...] | None = None
    """Files of held-out rows, in the format of data.path."""
    rows: int = Field(0, ge=0)
    """Number of rows to hold out from the end of the data, if there is no path. 0: none."""
    every: int = Field(50, ge=1)
    """Train steps between measurements of the validation loss. It is also measured before the
    first step and after the last."""

    @model_validator(mode="after")
    def _one_origin(self) -> "ValidationSettings":
        if self.path is not None and self.rows:
            raise ValueError(
                f"path = {self.path!r} and rows = {self.rows} are both set; keep only one of them"
            )
        return self


class SftConfig(Settings):
    LISTED_BY: ClassVar[str] = "paceline settings --sft"

    model: str = "tiny"
    """Local directory, GGUF file, Hugging Face model ID, or "tiny": a built-in model, created for
    the selected task on first use."""
    run_dir: str = Field("runs/sft", min_length=1)
    """Directory of metrics, logs, summary and checkpoints. A run in it is resumed."""
    seed: int = Field(0, ge=0)
    """Seed of the data order and of adapters."""
    rows_per_step: int = Field(
        32, ge=1, validation_alias=AliasChoices("rows_per_step", "train_batch_size")
    )
    """Rows per train step, over all ranks."""
    epochs: int = Field(1, ge=1)
    """Number of passes over the data."""
    steps: int | None = Field(None, ge=1)
    """Number of train steps, which replaces `epochs`. Default: as many as `epochs` need."""
    save_every: int = Field(100, ge=0)
    """Train steps between checkpoints. 0: only at the end."""
    save_every_s: float = Field(0.0, ge=0)
    """Seconds between checkpoints, in addition to save_every. 0: off."""
    grace_s: float = Field(60.0, ge=0)
    """Maximum seconds to finish and save the current step after Ctrl-C or SIGTERM. 0: stop at once.
    """
    keep_checkpoints: int = Field(2, ge=1)
    """Number of checkpoints to keep."""
    step_timeout_s: float = Field(600.0, gt=0)
    """Maximum seconds for a train step, and for each batch of held-out rows."""
    cluster: Literal["local", "ray"] = "local"
    """Where workers run: in processes of this machine, or on Ray."""
    track: tuple[Plugin, ...] = ()
    """Sinks that get the metrics of each step: custom functions or classes, as "file.py:function".
    """

    data: ExampleSettings = ExampleSettings()
    validation: ValidationSettings = ValidationSettings()
    train: SftTrainSettings = SftTrainSettings()
    placement: SftPlacementSettings = SftPlacementSettings()
    ray: RaySettings = RaySettings()

    @field_validator("track", mode="before")
    @classmethod
    def _one_sink_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str | Plugin) or callable(value) else value

    @model_validator(mode="after")
    def _workers_are_consistent(self) -> "SftConfig":
        """Check what a training run checks."""
        try:
            self.worker_config()
        except ValidationError as error:
            lines = [line for problem in error.errors() for line in explain(problem, SftConfig)]
            raise ValueError("; ".join(lines)) from None
        return self

    def worker_config(self, steps: int = 1) -> RunConfig:
        """Return the configuration of a run whose actor makes these train steps.

        Workers, their devices and their automatic settings depend on nothing else.
        """
        placement = {name: getattr(self.placement, name) for name in ("train_ranks", "min_gpus")}
        if "placement.threads" not in open_settings(self):
            placement["threads"] = self.placement.threads
        return RunConfig.model_validate(
            {
                **{name: getattr(self, name) for name in COMMON},
                "steps": steps,
                "groups_per_step": self.rows_per_step,
                "group_size": 1,
                "algorithm": {"name": "reinforce++"},
                "data": {"task": self.data.task, "max_prompt_length": self.data.max_length - 1},
                "rollout": {"max_response_length": 1},
                "placement": PlacementSettings(**placement),
            }
        )

    def with_choices(self, workers: RunConfig) -> "SftConfig":
        """Return these settings with the automatic ones as they were chosen for the workers."""
        chosen = {name: attrgetter(name)(workers) for name in open_settings(self)}
        return with_settings(self, chosen)


COMMON = ("model", "run_dir", "seed", "step_timeout_s", "cluster", "track", "train", "ray")


def load_sft_config(
    recipe: str | Path | None = None,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
) -> SftConfig:
    """Read a recipe, then apply `values` and `key=value` overrides, in this order.

    `values` are Python objects by name: nested mappings or dotted names. Raise ConfigError with a
    line per mistake.
    """
    found: dict[str, Any] = {}
    own: list[tuple[str, Any]] = []
    if recipe is not None:
        path = find_recipe(recipe)
        own = [("run_dir", f"runs/{path.stem}"), *flatten(read_recipe(path))]
    given = [*flatten(values or {}), *(parse_setting(override) for override in overrides)]
    for settings in (own, given):
        for key, value in settings:
            apply_setting(found, key, value, SftConfig)
        drop_alternatives(found, {key for key, value in settings if value is not None})
    return validated(SftConfig, found, recipe)
