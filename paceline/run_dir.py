"""The run directory: one run at a time locks it; an earlier run in it is resumed, rejected or moved
aside."""

import errno
import fcntl
import itertools
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.config import RunConfig, differences
from paceline.errors import CheckpointError
from paceline.queue.ledger import LedgerState
from paceline.training.checkpoint import latest_checkpoint, read_state, remove_leftovers
from paceline.types import Role


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run starts: at step 0 or at its last complete checkpoint."""

    checkpoint: Path | None
    step: int
    ledger: LedgerState | None
    metrics_length: int


def lock_run_dir(folder: Path) -> IO[str]:
    """Create the run directory and lock it, so that two runs never share one.

    A new one is readable only by its owner: it contains prompts, completions and paths.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"run_dir = {folder} is in use by another run; wait for it, or use another run_dir"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"run_dir = {folder} cannot be used: {error}; expected a writable directory"
        ) from None
    return lock


def move_aside(folder: Path) -> Path | None:
    """Rename the directory of an earlier run and return its new path; raise if it is active."""
    if not folder.exists():
        return None
    now = f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}"
    names = (folder.with_name(f"{now}-{number}" if number else now) for number in itertools.count())
    with lock_run_dir(folder):
        aside = next(name for name in names if not name.exists())
        folder.rename(aside)
    return aside


def finished_summary(folder: Path, step: int) -> dict[str, Any] | None:
    """Return the summary of the run that ended at this step, or None if it did not write one."""
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        return summary if summary["steps"] == step else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def recorded_config(folder: Path) -> dict[str, Any]:
    """Return the settings of the run that would be resumed; none if there is no checkpoint."""
    checkpoint = latest_checkpoint(folder / "checkpoints")
    found: dict[str, Any] = read_state(checkpoint)["config"] if checkpoint else {}
    return found


def find_start(config: RunConfig, identity: dict[str, Any]) -> Start:
    """Find the checkpoint to resume from; raise if its model, data or settings differ."""
    root = Path(config.run_dir) / "checkpoints"
    remove_leftovers(root)
    checkpoint = latest_checkpoint(root)
    if checkpoint is None and any(root.glob("step_*")):
        raise CheckpointError(
            f"no checkpoint in {root} is complete, so the run cannot be resumed; "
            "start over with --fresh (in Python: fresh=True)"
        )
    if checkpoint is None:
        return Start(None, 0, None, 0)
    state = read_state(checkpoint)
    found = differences(state["config"], identity["config"])
    found += [
        f"{name}: its content changed"
        for name in identity
        if name != "config" and state.get(name) != identity[name] and not found
    ]
    if found:
        raise CheckpointError(
            f"run_dir = {config.run_dir} has a run with other settings and cannot be resumed:\n  "
            + "\n  ".join(found)
            + "\nUse the settings it was started with, use another run_dir, or start over with "
            "--fresh (in Python: fresh=True). To start a new run from the weights of this one, "
            f"set another run_dir and model={checkpoint / Role.ACTOR}"
        )
    ledger = state.get("ledger")  # supervised runs have none
    start = Start(
        checkpoint,
        state["step"],
        LedgerState.from_json(ledger) if ledger else None,
        state["metrics_length"],
    )
    _check_lines(root.with_name("metrics.jsonl"), start.metrics_length, start.step)
    if ledger:
        _check_lines(root.with_name("ledger.jsonl"), ledger["length"], start.step)
    return start


def _check_lines(path: Path, length: int, step: int) -> None:
    """Raise if a file does not contain what it did when the checkpoint was written."""
    content = b""
    if path.exists():
        with path.open("rb") as file:
            content = file.read(length)
    try:
        whole = len(content) == length and all(
            isinstance(json.loads(line), dict) for line in content.splitlines()
        )
    except ValueError:
        whole = False
    if not whole:
        what = "a part is missing" if len(content) < length else "it is corrupted"
        raise CheckpointError(
            f"{path} does not match the checkpoint of step {step}: {what}. Restore the file, or "
            "start over with --fresh"
        )


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the disk that holds the run directory into a CheckpointError."""
    try:
        yield
    except OSError as error:
        ours = str(error.filename or "").startswith((str(folder), str(folder.resolve())))
        if (
            error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
            and not ours
        ):
            raise
        where = f" ({error.filename})" if ours else ""
        raise CheckpointError(
            f"run_dir = {folder} cannot be written: {error.strerror}{where}; "
            "fix the cause and run the same command again to resume from the last checkpoint"
        ) from error


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore write errors: a full disk is reported by the ledger, metrics and checkpoint
        writers."""


@contextmanager
def log_file(folder: Path) -> Iterator[None]:
    """Log this process, warnings and the output of reward functions included, to main.log."""
    folder.mkdir(exist_ok=True)
    logger, handler = logging.getLogger("paceline"), _LogFile(folder / "main.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()
