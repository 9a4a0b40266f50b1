"""Lineage of a run directory: which checkpoints belong to the history that the run continues.

Every start of a run is an attempt, which continues from a step. A checkpoint of an earlier attempt
beyond that step belongs to an abandoned future: its ledger and metrics no longer exist, so a later
start must not resume from it. The file has one JSON line with a checksum per attempt.
"""

import secrets
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError
from paceline.line_file import LineFile, read_lines

FILE = "attempts.jsonl"


def begin_attempt(run_dir: Path, step: int) -> str:
    """Record that an attempt continues from `step`; return its ID, which its checkpoints store."""
    attempt, path = secrets.token_hex(8), run_dir / FILE
    # What a crash left of a line is dropped: that attempt did not begin.
    file = LineFile(path, max((line.end for line in read_lines(path) if line.whole), default=0))
    try:
        file.write({"attempt": attempt, "from_step": step})
        file.flush(durable=True)
    finally:
        file.close()
    return attempt


class Lineage:
    """The attempts of a run directory so far."""

    def __init__(self, run_dir: Path) -> None:
        self._attempts = _read(run_dir / FILE)

    def check(self, folder: Path, state: dict[str, Any]) -> None:
        """Raise CheckpointError if the checkpoint belongs to an abandoned future."""
        own, later = state.get("attempt"), self._attempts
        for position, (attempt, _) in enumerate(self._attempts):
            if attempt == own:
                later = self._attempts[position + 1 :]
        for _, step in later:
            if step < state["step"]:
                raise CheckpointError(
                    f"checkpoint {folder} belongs to an abandoned future: the run continued from "
                    f"step {step} after it was written"
                )


def _read(path: Path) -> list[tuple[str, int]]:
    """Return the ID and first step of each attempt. A line that was cut by a crash is ignored."""
    found = []
    for line in read_lines(path):
        try:
            found.append((str(line.row["attempt"]), int(line.row["from_step"])))  # type: ignore[index]
        except (ValueError, KeyError, TypeError):
            if line.whole:
                raise CheckpointError(
                    f"{path}: line {line.number} is damaged, so it is unknown which checkpoints a "
                    "later start of the run left behind. Restore the file from a backup, or start "
                    "over with --fresh (in Python: fresh=True)"
                ) from None
    return found
