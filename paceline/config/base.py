"""Settings of every run, of reinforcement learning and supervised."""

import os
from itertools import combinations
from typing import Any, Literal

from pydantic import Field, field_validator

from paceline.plugins import Plugin
from paceline.settings import Settings

SINKS = "paceline.sinks"  # entry points of track
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")  # also their packages and extras


class RunSettings(Settings):
    model: str = "tiny"
    """Local directory, GGUF file, Hugging Face model ID, or "tiny": a built-in model, created for
    the selected task on first use."""
    run_dir: str = Field("runs/default", min_length=1)
    """Directory of metrics, ledger, logs, summary and checkpoints. A run in it is resumed."""
    seed: int = Field(0, ge=0)
    """Seed of sampling, data order and adapters."""
    save_every: int = Field(50, ge=0)
    """Train steps between checkpoints. 0: only at the end."""
    save_every_s: float = Field(0.0, ge=0)
    """Seconds between checkpoints, in addition to save_every. 0: off."""
    grace_s: float = Field(60.0, ge=0)
    """Maximum seconds to finish and save the current step after Ctrl-C or SIGTERM. 0: stop at once.
    """
    keep_checkpoints: int = Field(2, ge=1)
    """Number of checkpoints to keep."""
    step_timeout_s: float = Field(600.0, gt=0)
    """Maximum seconds for a train step."""
    cluster: Literal["local", "ray"] = "local"
    """Where workers run: in processes of this machine, or on Ray."""
    track: tuple[Plugin, ...] = ()
    """Sinks that get the metrics of each step: the trackers "tensorboard", "wandb", "mlflow" and
    "trackio", and custom functions or classes, as "file.py:function"."""

    @field_validator("run_dir", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        if "\0" in str(value):
            raise ValueError(f"run_dir = {value!r}: a path cannot contain a null character")
        return os.path.expanduser(value) if isinstance(value, str | os.PathLike) else value

    @field_validator("track", mode="before")
    @classmethod
    def _one_sink_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str | Plugin) or callable(value) else value

    @field_validator("track")
    @classmethod
    def _known_sinks(cls, sinks: tuple[Plugin, ...]) -> tuple[Plugin, ...]:
        for sink in sinks:
            if str(sink) not in TRACKERS:
                sink.check(SINKS, TRACKERS)
        if any(one.is_same(other) for one, other in combinations(sinks, 2)):
            raise ValueError(f"{', '.join(map(str, sinks))}: a sink is named twice")
        return sinks
