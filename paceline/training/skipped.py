"""Skipped updates: a loss, gradient or log-prob that is not finite changes no weight.

The batch is saved for `paceline replay`, and the error says the likely cause.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from paceline.errors import DataError, NonFiniteError
from paceline.types import Batch

log = logging.getLogger(__name__)

FOLDER = "skipped"
MAX_DUMPS = 10  # in a run directory; the first ones show the cause

# Arrays of a batch: with an entry per row, the others per token; of flags and integers, the others
# of floating-point numbers.
PER_ROW = ("lengths", "rewards", "groups", "truncated", "baselines", "trajectories")
FLAGS = ("mask", "truncated")
INTEGERS = ("tokens", "lengths", "versions", "groups", "trajectories")

DIVERGED = (
    "the log-probs of the trainer are not finite: an earlier update was too large, or the model "
    "overflows in train.dtype; lower train.learning_rate and continue from an earlier checkpoint, "
    "or set train.dtype = 'float32'"
)
OVERFLOW = (
    "only the gradient is not finite: it overflows; scale down the rewards or a custom loss, or "
    "set train.dtype = 'float32'"
)


@dataclass(frozen=True, slots=True)
class Dump:
    """The batch of a skipped update, and what is needed to repeat its computation."""

    batch: Batch
    step: int
    kl_coef: float | None
    config: dict[str, Any]


class SkippedUpdates:
    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        """`config`: all settings of the run, which are saved with each batch."""
        self._folder, self._config = run_dir / FOLDER, config

    def check(
        self,
        batch: Batch,
        step: int,
        metrics: Mapping[str, float],
        kl_coef: float | None = None,
    ) -> None:
        """Raise NonFiniteError if all updates of a step were skipped; warn if some were."""
        role = "train" if "train/updates" in metrics else "critic"
        skipped = [f"{name}/updates_skipped" for name in ("train", "critic")]
        if not any(metrics.get(name) for name in skipped):
            return
        saved = self._save(Dump(batch, step, kl_coef, self._config))
        cause = likely_cause(batch, metrics)
        where = f"; the batch is saved: paceline replay {quote(str(saved))}" if saved else ""
        count, total = metrics.get(f"{role}/updates_skipped", 0), metrics.get(f"{role}/updates", 0)
        if count and count == total:
            raise NonFiniteError(
                f"step {step + 1}: the update was skipped and no weight changed, because {cause}"
                f"{where}"
            )
        log.warning(
            "step %d: some of its updates were skipped (%s), because %s%s",
            step + 1,
            ", ".join(f"{name} = {metrics[name]:g}" for name in skipped if metrics.get(name)),
            cause,
            where,
        )

    def _save(self, dump: Dump) -> Path | None:
        """Save a batch and return its path, or None if there are enough or the disk is full."""
        try:
            self._folder.mkdir(exist_ok=True)
            number = len(list(self._folder.glob("*.npz")))
            if number >= MAX_DUMPS:
                return None
            path = self._folder / f"step_{dump.step + 1:08d}_{number}.npz"
            write_dump(path, dump)
        except OSError as error:  # the ledger or the next checkpoint reports a full disk
            log.warning("cannot save the batch of a skipped update: %s", error)
            return None
        return path


def too_many(error: NonFiniteError, count: int) -> NonFiniteError:
    """Return the error that ends the run after `count` skipped updates in a row."""
    return NonFiniteError(
        f"{count} updates in a row were skipped (train.max_skipped_updates = {count}); the last: "
        f"{error}"
    )


def likely_cause(batch: Batch, metrics: Mapping[str, float]) -> str:
    """Return what is not finite, from the inputs of the loss to the gradient, and what to do."""
    inputs = {
        "a reward": (batch.rewards, "check the reward function"),
        "a sampled log-prob": (batch.logprobs, "check the rollout engine"),
        "a log-prob of the reference model": (batch.ref_logprobs, "check that model"),
        "a value of the critic": (batch.values, "the critic diverged; lower train.learning_rate"),
        "an advantage": (batch.advantages, "check the rewards and the advantage function"),
    }
    for name, (values, advice) in inputs.items():
        if values is not None and not np.isfinite(values).all():
            return f"{name} is not finite; {advice}"
    entropy = metrics.get("train/entropy", 0.0)
    if not math.isfinite(entropy):
        return DIVERGED
    for role, name in (("train", "the loss"), ("critic", "the loss of the critic")):
        loss = metrics.get(f"{role}/loss", 0.0)
        if not math.isfinite(loss):
            return f"{name} is {loss}; {DIVERGED.partition('; ')[2]}"
    return OVERFLOW


def write_dump(path: Path, dump: Dump) -> None:
    """Write a dump: the arrays of its batch, and the rest as JSON."""
    rest = {"step": dump.step, "kl_coef": dump.kl_coef, "config": dump.config}
    arrays = {
        field.name: value
        for field in fields(dump.batch)
        if (value := getattr(dump.batch, field.name)) is not None
    }
    text = np.frombuffer(json.dumps(rest).encode(), np.uint8)
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            np.savez_compressed(file, **arrays, json=text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # it would keep a full disk full
        raise


def read_dump(path: Path) -> Dump:
    """Read a dump. Raises DataError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        rest = json.loads(arrays.pop("json").tobytes())
        kl_coef = None if rest["kl_coef"] is None else float(rest["kl_coef"])
        _check_arrays(arrays)
        return Dump(Batch(**arrays), int(rest["step"]), kl_coef, dict(rest["config"]))
    except Exception as error:  # a damaged archive raises errors of many types
        raise DataError(
            f"{path} cannot be read: {error}; expected a file that a run saved in its directory "
            f"{FOLDER}/"
        ) from None


def _check_arrays(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Raise ValueError if arrays are not those of one batch: the trainer would misread them."""
    lengths = arrays["lengths"]
    sizes = (len(lengths), int(lengths.sum()))
    for name, array in arrays.items():
        expected = "b" if name in FLAGS else "i" if name in INTEGERS else "f"
        if array.shape != (sizes[name not in PER_ROW],) or array.dtype.kind != expected:
            raise ValueError(f"{name} has shape {array.shape} and dtype {array.dtype}")
    if not len(lengths) or lengths.min() < 1:
        raise ValueError("the batch has an empty row, or no row")
