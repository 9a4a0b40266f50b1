"""The run directory: one run at a time locks it; an earlier run in it is resumed, rejected or moved
aside."""

import asyncio
import errno
import itertools
import json
import logging
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import file_lock
from paceline.config import RunConfig, differences
from paceline.errors import CheckpointError
from paceline.line_file import read_lines
from paceline.printable import LogFormatter
from paceline.queue.ledger import LedgerState
from paceline.rollout.in_flight_files import FOLDER as IN_FLIGHT
from paceline.training.checkpoint import (
    MANIFEST,
    latest_checkpoint,
    remove_leftovers,
    save_checkpoint,
    verify_checkpoint,
)
from paceline.training.manifest import read_run_state
from paceline.types import Role

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run starts: at step 0 or at its last complete checkpoint."""

    checkpoint: Path | None
    step: int
    ledger: LedgerState | None
    metrics_length: int
    abandons_later: bool = False  # it was asked for, and later checkpoints may exist


@contextmanager
def lock_run_dir(folder: Path) -> Iterator[None]:
    """Create the run directory and lock it, so that two runs never share one.

    A new one is readable only by its owner: it contains prompts, completions and paths.
    """
    path = folder / "lock"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = path.open("w")
        file_lock.acquire(lock, folder)
        while not file_lock.is_in_place(lock, path):  # it was deleted in between
            lock.close()
            lock = path.open("w")
            file_lock.acquire(lock, folder)
        for name in ("ledger.jsonl", "metrics.jsonl"):  # a run writes them, though its lock is gone
            if (folder / name).is_file():
                with (folder / name).open("rb") as file:
                    file_lock.acquire(file, folder)
                    file_lock.release(file)
    except OSError as error:
        raise CheckpointError(
            f"run_dir = {folder} cannot be used: {error}; expected a writable directory"
        ) from None
    try:
        yield
    finally:
        file_lock.release(lock)


def move_aside(folder: Path) -> Path | None:
    """Rename the directory of an earlier run and return its new path; raise if it is active."""
    if not folder.exists():
        return None
    if folder.resolve() in (here := Path.cwd().resolve(), *here.parents):
        raise CheckpointError(
            f"run_dir = {folder} contains the current directory, so it cannot be moved aside; use "
            "another run_dir, or run the command in another directory"
        )
    now = f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}"
    names = (folder.with_name(f"{now}-{number}" if number else now) for number in itertools.count())
    with lock_run_dir(folder):
        aside = next(name for name in names if not name.exists())
        folder.rename(aside)
    return aside


def finished_summary(folder: Path, step: int, names: Collection[str]) -> dict[str, Any] | None:
    """Return the summary of the run that ended at this step, or None if it did not write one.

    A summary of an earlier version may lack some of the `names`; then the run writes it again.
    """
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        complete = summary["steps"] == step and all(name in summary for name in names)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return summary if complete else None


def recorded_config(folder: Path, start_from: str | None = None) -> dict[str, Any]:
    """Return the settings of the run that would be resumed; none if there is no checkpoint."""
    checkpoint = first_checkpoint(folder, start_from)
    found: dict[str, Any] = read_run_state(checkpoint)["config"] if checkpoint else {}
    return found


def first_checkpoint(run_dir: Path, start_from: str | None) -> Path | None:
    """Return the checkpoint that a run starts from: its latest one, or the given step or path."""
    root = run_dir / "checkpoints"
    if start_from is None:
        return latest_checkpoint(root)
    checkpoint = root / f"step_{int(start_from):08d}" if start_from.isdigit() else Path(start_from)
    if not checkpoint.is_dir():
        present = ", ".join(path.name for path in sorted(checkpoint.parent.glob("step_*")))
        raise CheckpointError(
            f"--from {start_from} (in Python: resume_from): there is no checkpoint {checkpoint}; "
            "expected a step or the directory of a checkpoint "
            f"(in {checkpoint.parent}: {present or 'none'})"
        )
    if near := _checkpoint_near(checkpoint):
        raise CheckpointError(
            f"--from {start_from} (in Python: resume_from) is not the directory of a checkpoint; "
            f"did you mean {near}?"
        )
    verify_checkpoint(checkpoint)
    return checkpoint


def _checkpoint_near(folder: Path) -> Path | None:
    """Return the checkpoint whose model is in `folder`, or the last one of the run in `folder`."""
    if (folder / MANIFEST).exists():
        return None
    if (folder.parent / MANIFEST).exists():
        return folder.parent
    return next(iter(sorted(folder.glob("checkpoints/step_*"), reverse=True)), None)


def branches(run_dir: Path, start_from: str | None) -> bool:
    """Return whether a run starts from a checkpoint of another run; raise if it has begun."""
    root = run_dir / "checkpoints"
    if start_from is None or start_from.isdigit():
        return False
    if Path(start_from).resolve().parent == root.resolve():
        raise CheckpointError(
            f"--from {start_from} is a checkpoint of this run; give its step instead of its path, "
            "or use another run_dir to keep both"
        )
    if any(root.glob("step_*")):
        raise CheckpointError(
            f"run_dir = {run_dir} has a run already, so it cannot start from {start_from}; resume "
            "it without --from, or use another run_dir"
        )
    return True


async def branch(
    run_dir: Path, start_from: str, identity: dict[str, Any], *, supervised: bool = False
) -> None:
    """Begin a run with a checkpoint of another one: weights, optimizer, step and ledger."""
    checkpoint = Path(start_from)
    state = read_run_state(checkpoint)
    changed = [name for name in identity if name != "config" and state.get(name) != identity[name]]
    ledger = state.get("ledger")
    if (ledger is None) != supervised:
        changed = ["the kind of training", *changed]
    if changed:
        raise CheckpointError(
            f"--from {start_from}: {' and '.join(changed)} of that run differ from this one's. To "
            f"start a new run from its weights alone, set model={checkpoint / Role.ACTOR}"
        )
    for difference in differences(state["config"], identity["config"]):
        log.warning("the run that this one starts from had other settings: %s", difference)
    lengths = {"metrics.jsonl": state["metrics_length"]}
    if ledger:
        lengths["ledger.jsonl"] = ledger["length"]
    for name, length in lengths.items():
        with checkpoint.parents[1].joinpath(name).open("rb") as earlier:
            (run_dir / name).write_bytes(earlier.read(length))

    async def copy(target: Path) -> None:
        own = shutil.ignore_patterns("state.json", MANIFEST, IN_FLIGHT)
        await asyncio.to_thread(shutil.copytree, checkpoint, target, ignore=own, dirs_exist_ok=True)

    root = run_dir / "checkpoints"
    await save_checkpoint(root, state["step"], {**state, **identity}, copy, keep=1)


def set_later_aside(run_dir: Path, step: int) -> None:
    """Move checkpoints after this step away: the run takes another way from here."""
    root = run_dir / "checkpoints"
    later = [path for path in root.glob("step_*") if path.name > f"step_{step:08d}"]
    if later:
        aside = root / f"abandoned.{time.strftime('%Y%m%d-%H%M%S')}"
        aside.mkdir()
        for path in later:
            path.rename(aside / path.name)
        log.warning("moved %d checkpoints after step %d to %s", len(later), step, aside)
    best = root / "best"
    if best.is_symlink() and not best.exists():
        best.unlink()


def find_start(config: RunConfig, identity: dict[str, Any], start_from: str | None = None) -> Start:
    """Find the checkpoint to resume from; raise if its model, data or settings differ."""
    root = Path(config.run_dir) / "checkpoints"
    remove_leftovers(root)
    checkpoint = first_checkpoint(Path(config.run_dir), start_from)
    if checkpoint is None and any(root.glob("step_*")):
        raise CheckpointError(
            f"no checkpoint in {root} is complete, so the run cannot be resumed; "
            "start over with --fresh (in Python: fresh=True)"
        )
    if checkpoint is None:
        return Start(None, 0, None, 0)
    state = read_run_state(checkpoint)
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
        start_from is not None,
    )
    # A damaged line of metrics costs a warning when the recorder reads them. The ledger decides
    # which prompts are trained, so it must be right.
    _check_length(root.with_name("metrics.jsonl"), start.metrics_length, start.step)
    if ledger:
        path = root.with_name("ledger.jsonl")
        _check_length(path, ledger["length"], start.step)
        for line in read_lines(path, ledger["length"]):
            if line.row is None or not line.whole:
                raise _mismatch(path, start.step, f"line {line.number} is damaged")
    return start


def _check_length(path: Path, length: int, step: int) -> None:
    if (path.stat().st_size if path.exists() else 0) < length:
        raise _mismatch(path, step, "a part is missing")


def _mismatch(path: Path, step: int, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} does not match the checkpoint of step {step}: {what}. Restore the file from a "
        "backup, or start over with --fresh (in Python: fresh=True)"
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
    handler.setFormatter(LogFormatter())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()
