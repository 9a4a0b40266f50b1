"""Replay of a skipped update: its batch with the weights of a checkpoint, without training."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from paceline.config import RunConfig
from paceline.data.tiny import resolve_model
from paceline.errors import CheckpointError, DataError, StalledError
from paceline.suspend import ignore_suspended_time
from paceline.training.checkpoint import MANIFEST, latest_checkpoint, read_state, verify_checkpoint
from paceline.training.skipped import Dump, read_dump
from paceline.types import Role
from paceline.workers.layout import choose_settings
from paceline.workers.pools import open_workers


@dataclass(frozen=True, slots=True)
class Replayed:
    step: int  # that was skipped, counted from 1
    weights: str
    same_weights: bool  # of the version that the update started from
    rows: int
    result: dict[str, Any]  # see training/replay.py


async def replay_dump(path: Path, weights: Path | None = None) -> Replayed:
    """Repeat the computation of the update whose batch was saved at `path`.

    `weights`: a checkpoint or a model. Default: the last checkpoint of the run, or its model.
    """
    ignore_suspended_time(asyncio.get_running_loop())
    dump = read_dump(path)
    config = _settings(path, dump)
    checkpoint, step = _checkpoint(path, dump, weights)
    if weights is not None and checkpoint is None:
        config = config.model_copy(update={"model": str(weights)})
    model_path = resolve_model(config.model, config.data.task)
    config = await choose_settings(config, model_path, (Role.ACTOR,))
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="paceline-replay-")))
        _, _, workers = await open_workers(stack, config, (Role.ACTOR,), model_path, logs)
        actor = workers[Role.ACTOR][0]
        try:
            async with asyncio.timeout(config.step_timeout_s) as deadline:
                if checkpoint:
                    await actor.call(Role.ACTOR, "load", str(checkpoint))
                result = await actor.call(Role.ACTOR, "replay", dump.batch, dump.step, dump.kl_coef)
        except TimeoutError:
            if not deadline.expired():  # an error of the worker
                raise
            raise StalledError(
                f"the replay took longer than step_timeout_s = {config.step_timeout_s:g} s"
            ) from None
    used = str(checkpoint or config.model)
    return Replayed(dump.step + 1, used, step == dump.step, dump.batch.num_rows, result)


def _settings(path: Path, dump: Dump) -> RunConfig:
    try:
        return RunConfig.model_validate(dump.config)
    except ValidationError as error:
        raise DataError(
            f"{path} cannot be replayed, because its settings are not valid: {error}"
        ) from error


def _checkpoint(path: Path, dump: Dump, weights: Path | None) -> tuple[Path | None, int | None]:
    """Return the checkpoint to load and its step; None and the step, if known, of a model."""
    if weights is None:
        checkpoint = latest_checkpoint(path.absolute().parent.parent / "checkpoints", dump.step)
        return checkpoint, read_state(checkpoint)["step"] if checkpoint else 0
    if not weights.exists():
        raise CheckpointError(
            f"{weights} does not exist; expected a checkpoint such as "
            "RUN_DIR/checkpoints/step_00000100, or the directory of a model"
        )
    if (weights / MANIFEST).exists():
        verify_checkpoint(weights)
        return weights, read_state(weights)["step"]
    return None, None
