"""Files of JSON lines with a checksum per line: ledger, metrics, samples, distributions and others.

The checksum is the last key of a line, `"crc": "1c291ca3"`, so every tool that reads JSON lines
reads these files. It is the CRC-32 of the bytes before it. Lines without one, which earlier
versions wrote, are read too, but only before the first line that has one.
"""

import json
import logging
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import file_lock
from paceline.errors import CheckpointError

log = logging.getLogger(__name__)

MAX_MARK = 4096  # bytes before the end of what was read, which show whether a file was changed
_TAIL = re.compile(rb', "crc": "([0-9a-f]{8})"\}')
_TEMPLATE = b', "crc": "........"}'


@dataclass(frozen=True, slots=True)
class Line:
    number: int  # from 1
    end: int  # bytes of the file up to here
    row: dict[str, Any] | None  # None: the line is damaged, or a crash left it incomplete
    whole: bool  # ends with a newline


def encode_line(row: dict[str, Any], *, ascii_only: bool = True) -> bytes:
    """Return a row as a line with its checksum. The row must not be empty."""
    # A lone surrogate is written as the escape that JSON has for it.
    text = json.dumps(row, ensure_ascii=ascii_only).encode("utf-8", "backslashreplace")
    return with_checksum(text)


def with_checksum(row: bytes) -> bytes:
    """Return the JSON of a row as a line with its checksum."""
    text = row[:-1]
    return b'%b, "crc": "%08x"}\n' % (text, zlib.crc32(text))


def read_lines(path: Path, length: int | None = None, start: int = 0) -> Iterator[Line]:
    """Yield the lines of a file, or of its first `length` bytes; nothing if there is no file.

    With `start`, yield and number the lines from this byte on.
    """
    if not path.exists():
        return
    end, checked = start, False
    with path.open("rb") as file:
        file.seek(start)
        for number, text in enumerate(file, 1):
            if length is not None:
                text = text[: length - end]
            if not text:
                return
            end += len(text)
            row, has_checksum = _decode(text.removesuffix(b"\n"), checked)
            checked |= has_checksum
            yield Line(number, end, row, text.endswith(b"\n"))


def intact_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; skip a damaged line with a warning and an incomplete last line."""
    yield from (line.row for line in intact_lines(path) if line.row is not None)


def intact_lines(path: Path) -> Iterator[Line]:
    for line in read_lines(path):
        if line.row is not None:
            yield line
        elif line.whole:
            log.warning(
                "%s: line %d is damaged and is skipped. Checkpoints are not affected; restore the "
                "file from a backup to get the line back",
                path,
                line.number,
            )


def step_of(row: dict[str, Any] | None) -> float:
    """Return the step of a line; infinity if the line is damaged or has none."""
    step = row.get("step") if row else None
    return step if isinstance(step, int) else float("inf")


def end_of_step(path: Path, step: int) -> int:
    """Return the bytes of a file up to the lines of a step, where a resumed run continues."""
    kept = (line.end for line in intact_lines(path) if step_of(line.row) <= step)
    return max(kept, default=0)


class LineTail:
    """Reader of a file that another process extends: each call continues at the last whole line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last, self._end = b"", 0  # the last bytes that were read, and their end

    def changed(self) -> bool:
        """Return whether lines that were read were truncated or replaced; then start over."""
        if not self._end:
            return False
        try:
            with self.path.open("rb") as file:
                file.seek(self._end - len(self._last))
                same = file.read(len(self._last)) == self._last
        except FileNotFoundError:
            same = False
        if not same:
            self._last, self._end = b"", 0
        return not same

    def read(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the start and the row of each new intact line."""
        for line in read_lines(self.path, start=self._end):
            if not line.whole:
                return
            start, self._end = self._end, line.end
            if line.row is not None:
                yield start, line.row

    def mark(self) -> None:
        """Remember the last bytes that were read, for `changed`."""
        if self._end:
            with self.path.open("rb") as file:
                file.seek(max(0, self._end - MAX_MARK))
                self._last = file.read(self._end - file.tell())


class LineFile:
    """Writer that appends lines. It fails if its file is moved or deleted."""

    def __init__(self, path: Path, length: int = 0, *, locked: bool = False) -> None:
        """Keep the first `length` bytes of the file and drop the rest.

        `locked`: raise CheckpointError if another run writes it. Its lock on the whole directory
        may have been deleted.
        """
        self.path = path
        self._file = path.open("ab")
        if locked:
            file_lock.acquire(self._file, path.parent)
        self._file.truncate(length)
        if length:
            with path.open("rb") as file:
                file.seek(length - 1)
                if file.read(1) != b"\n":  # damaged: the next line must not become part of it
                    self._file.write(b"\n")

    def write(self, row: dict[str, Any], *, ascii_only: bool = True) -> None:
        self._file.write(encode_line(row, ascii_only=ascii_only))

    def write_encoded(self, row: bytes) -> None:
        """Append a row that is JSON already."""
        self._file.write(with_checksum(row))

    def flush(self, *, durable: bool = False) -> None:
        """Write what is buffered to the file, with `durable` to the disk."""
        self.check_in_place()
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())

    def durable_length(self) -> int:
        """Return the bytes of the file, all of which are on the disk."""
        self.flush(durable=True)
        return os.fstat(self._file.fileno()).st_size

    def check_in_place(self) -> None:
        """Raise if the path does not name the open file: later lines would be lost with it."""
        if not file_lock.is_in_place(self._file, self.path):
            raise CheckpointError(_moved(self.path, self._file.fileno()))

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            file_lock.release(self._file)


def _decode(text: bytes, checked: bool) -> tuple[dict[str, Any] | None, bool]:
    """Return the row of a line, or None, and whether the line has a valid checksum."""
    tail = _TAIL.fullmatch(text[-len(_TEMPLATE) :])
    if tail:
        if zlib.crc32(text[: -len(_TEMPLATE)]) != int(tail[1], 16):
            return None, False
    elif checked or _resembles_checksum(text):
        return None, False
    try:
        row = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None, False
    if not isinstance(row, dict):
        return None, False
    if tail:
        del row["crc"]
    return row, tail is not None


def _resembles_checksum(text: bytes) -> bool:
    """Return whether a line has a checksum of which up to two bytes besides its digits changed.

    Otherwise a line whose checksum is damaged would pass as one without.
    """
    pairs = zip(text[-len(_TEMPLATE) :], _TEMPLATE, strict=False)
    return sum(found != expected for found, expected in pairs if expected != ord(".")) <= 2


def _moved(path: Path, descriptor: int) -> str:
    try:
        now = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        now = ""  # only Linux knows the name of an open file
    what, action = "moved or deleted", "Move it back"
    if now.endswith(" (deleted)"):
        what, action = "deleted", "Restore the directory from a backup"
    elif now:
        what, action = f"moved to {now}", f"Move it back, or set run_dir={Path(now).parent},"
    return (
        f"run_dir = {path.parent}: {path.name} was {what} while the run was using it, so the run "
        f"ended. {action} and run the same command again to resume from the last checkpoint; "
        "without a checkpoint the run starts over"
    )
