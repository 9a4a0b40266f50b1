"""The run folder: one run at a time holds it; what it holds is continued, refused or moved aside."""

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
from paceline.train.checkpoint import latest_checkpoint, read_state
from paceline.types import Role


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: at step 0, or where its last whole checkpoint left it."""

    checkpoint: Path | None
    step: int
    ledger: LedgerState | None
    metrics_length: int


def open_folder(config: RunConfig) -> IO[str]:
    """Make the run folder and hold its lock, so that two runs never share one."""
    return _locked(Path(config.run_dir))


def _locked(folder: Path) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"run folder {folder} is in use by another run; wait for it, or set run_dir to another folder"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"run folder {folder} cannot be used: {error}; set run_dir to a folder that can be written"
        ) from None
    return lock


def move_aside(folder: Path) -> Path | None:
    """Make room for a new run; where the one that was there is now. Refused while that one is running."""
    if not folder.exists():
        return None
    now = f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}"
    names = (folder.with_name(f"{now}-{number}" if number else now) for number in itertools.count())
    with _locked(folder):
        aside = next(name for name in names if not name.exists())
        folder.rename(aside)
    return aside


def finished_summary(folder: Path, step: int) -> dict[str, Any] | None:
    """What the run that ended at this step has left; None if it was stopped before it could write it."""
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        return summary if summary["steps"] == step else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_start(config: RunConfig, identity: dict[str, Any]) -> Start:
    """Look for a checkpoint to continue from; refuse one of another model, data set or setting, with the differences."""
    root = Path(config.run_dir) / "checkpoints"
    checkpoint = latest_checkpoint(root)
    if checkpoint is None and any(root.glob("step_*")):
        raise CheckpointError(
            f"no checkpoint in {root} is whole, so there is nothing to continue from; start over with --fresh"
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
            f"run folder {config.run_dir} holds a run with other settings and cannot be continued with these:\n  "
            + "\n  ".join(found)
            + "\nuse the settings it was started with, set run_dir to another folder, or start over with --fresh; "
            f"a new run from the weights of this one has model={checkpoint / Role.ACTOR} and another run_dir"
        )
    start = Start(
        checkpoint, state["step"], LedgerState.from_json(state["ledger"]), state["metrics_length"]
    )
    for name, length in {
        "metrics.jsonl": start.metrics_length,
        "ledger.jsonl": state["ledger"]["length"],
    }.items():
        _check_lines(root.with_name(name), length, start.step)
    return start


def _check_lines(path: Path, length: int, step: int) -> None:
    """Refuse books that are not what they were when the checkpoint was made."""
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
        what = "a part is missing" if len(content) < length else "it is damaged"
        raise CheckpointError(
            f"{path} is not what it was at step {step}: {what}; bring it back, or use --fresh"
        )


@contextmanager
def disk_explained(folder: Path) -> Iterator[None]:
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
            f"run folder {folder} cannot be written: {error.strerror}{where}; "
            "make that right, and the same command continues from the last checkpoint"
        ) from error


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk is told of by those who cannot do without it."""


@contextmanager
def log_file(folder: Path) -> Iterator[None]:
    """What this process has to say, warnings and a reward's prints among it, goes to a file beside the workers' own."""
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
