"""Readers of JSON, CSV, Parquet and Arrow files.

A row that cannot be read is reported with its file and number, never dropped silently.
"""

import csv
import difflib
import glob
import gzip
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from paceline.errors import DataError

JSON, CSV, ARROW = (".jsonl", ".ndjson", ".json"), (".csv", ".tsv"), (".parquet", ".arrow")
READABLE = (*JSON, *CSV, *ARROW)
FIRST_ROWS = 100
LARGE_ARRAY = 16 << 20  # bytes; a larger JSON array takes more than a moment to parse


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """One row of a file: the row itself, or why it could not be read."""

    where: str  # "train.jsonl:17"; numbers start at 1
    row: Mapping[str, Any]
    problem: str = ""


def find_files(patterns: tuple[str, ...]) -> list[Path]:
    """Return the files that paths and glob patterns match, each once, in a stable order."""
    files: dict[Path, None] = {}
    for pattern in patterns:
        try:
            plain = Path(pattern).expanduser()
            matches = [plain]
            if not plain.exists():
                matches = sorted(Path(p) for p in glob.glob(str(plain), recursive=True))
        except (OSError, ValueError, RuntimeError) as e:  # too long, a null byte, no such user
            raise DataError(f"data.path = {pattern!r} is not a path: {e}") from e
        if not matches or not pattern:  # the empty path is that of this directory
            raise DataError(
                f"no data file at {pattern!r} (relative paths start at {Path.cwd()}); "
                + (_similar(plain) or "check data.path")
            )
        for match in matches:
            for file in _saved_dataset(match) if match.is_dir() else [match]:
                if _extension(file) not in READABLE:
                    raise DataError(
                        f"{file}: cannot read {file.suffix or 'a file without extension'}; "
                        f"expected one of {', '.join(READABLE)} (text also with .gz)"
                    )
                if file.exists() and not file.is_file():  # a pipe or a device may never end
                    raise DataError(f"{file} is not a regular file; expected a data file")
                files[file] = None
    return list(files)


def _similar(file: Path) -> str:
    near = [other.name for other in file.parent.glob("*") if _extension(other) in READABLE]
    # The common extension alone makes names somewhat similar.
    close = difflib.get_close_matches(file.name, near, n=1, cutoff=0.75)
    return f"did you mean {str(file.with_name(close[0]))!r}?" if close else ""


def read_files(files: list[Path], batch_rows: int = 1 << 16) -> Iterator[ParsedRow]:
    """Yield all rows. A file is labeled by its name, or by its path if two names are equal.

    `batch_rows`: rows of Parquet that are decoded together.
    """
    names = Counter(file.name for file in files)
    for file in files:
        label = file.name if names[file.name] == 1 else str(file)
        try:
            if file.stat().st_size == 0:
                raise DataError(f"{file} is empty; expected at least one row")
            is_arrow = _extension(file) in ARROW
            yield from _read_arrow(file, label, batch_rows) if is_arrow else _read_text(file, label)
        except OSError as e:
            raise DataError(f"cannot read {file}: {e.strerror or e}") from e
        except (EOFError, zlib.error) as e:
            raise DataError(f"{file} is not a complete gzip file: {e}") from e


def is_data_file(file: Path) -> bool:
    """Return whether the name is that of a readable file."""
    return _extension(file) in READABLE


def first_rows(file: Path) -> list[ParsedRow]:
    """Return some rows from the start of a file, quickly; none if that needs the whole file."""
    if _extension(file) == ".json" and file.stat().st_size > LARGE_ARRAY:
        return []
    return list(islice(read_files([file], FIRST_ROWS), FIRST_ROWS))


def _extension(file: Path) -> str:
    """Return the extension of the uncompressed content: "a.JSONL.gz" has ".jsonl"."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    if len(suffixes) == 2 and suffixes[-1] == ".gz" and suffixes[-2] not in ARROW:
        return suffixes[-2]
    return "".join(suffixes[-1:])


def _saved_dataset(directory: Path) -> list[Path]:
    """Return the files of a dataset saved by the library `datasets`.

    Raises DataError for any other directory and suggests a pattern for the files in it.
    """
    if (directory / "state.json").is_file():
        try:
            state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
            return [directory / _plain_name(part["filename"]) for part in state["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
            raise DataError(
                f"{directory / 'state.json'} does not describe a saved dataset: {e!r}"
            ) from e
    if (directory / "dataset_dict.json").is_file():
        splits = sorted(str(state.parent) for state in directory.glob("*/state.json"))
        raise DataError(
            f"data.path = {str(directory)!r} is a dataset with several splits; "
            f"select one: {' or '.join(splits)}"
        )
    inside = [
        file
        for depth in ("*", "*/*")
        for file in sorted(directory.glob(depth))
        if _extension(file) in READABLE
    ]
    hint = (
        f"{inside[0].parent}/*{''.join(inside[0].suffixes)}" if inside else f"{directory}/*.jsonl"
    )
    raise DataError(
        f"data.path = {str(directory)!r} is a directory; expected its files, for example '{hint}'"
    )


def _plain_name(name: Any) -> str:
    """Return the name of a file of the dataset. Raise ValueError if it leads elsewhere."""
    if not isinstance(name, str) or name != Path(name).name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file in this directory")
    return name


def _read_text(file: Path, label: str) -> Iterator[ParsedRow]:
    compressed = file.suffix.lower() == ".gz"
    with gzip.open(file, "rb") if compressed else file.open("rb") as raw:
        content = io.BufferedReader(raw)
        if _extension(file) in CSV:
            yield from _read_csv(content, file, label)
        elif content.peek(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            yield from _read_array(content, file, label)
        else:
            yield from _read_lines(content, label)


def _read_lines(lines: Iterable[bytes], label: str) -> Iterator[ParsedRow]:
    for number, line in enumerate(lines, 1):
        where = f"{label}:{number}"
        if not line.strip():
            continue  # a blank line, as at the end of many files, is not a row
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as e:
            yield ParsedRow(where, {}, f"not UTF-8 (byte {e.start + 1} of the line)")
        except (ValueError, RecursionError) as e:  # also: an integer with thousands of digits
            yield ParsedRow(where, {}, f"not JSON ({e})")
        else:
            yield _object(row, where)


def _read_array(content: IO[bytes], file: Path, label: str) -> Iterator[ParsedRow]:
    try:
        rows = json.loads(content.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise DataError(f"{file} starts with [ but is not a JSON array of rows: {e}") from e
    for number, row in enumerate(rows, 1):
        yield _object(row, f"{label}:{number}")


def _object(row: Any, where: str) -> ParsedRow:
    if isinstance(row, dict):
        return ParsedRow(where, row)
    return ParsedRow(where, {}, f"expected a JSON object, got {type(row).__name__}")


def _read_csv(content: IO[bytes], file: Path, label: str) -> Iterator[ParsedRow]:
    """Yield the rows of a CSV file. The first line has the column names; every value is text."""
    csv.field_size_limit(sys.maxsize)
    lines = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
    rows = csv.DictReader(lines, delimiter="\t" if _extension(file) == ".tsv" else ",", strict=True)
    number = 0
    try:
        _check_separator(rows, file)
        for number, row in enumerate(rows, 1):
            fits = None not in row and None not in row.values()
            wrong = f"does not have the {len(rows.fieldnames or ())} fields of the first line"
            where = f"{label}:{number}"
            yield ParsedRow(where, row) if fits else ParsedRow(where, {}, wrong)
    except (csv.Error, UnicodeDecodeError) as e:
        raise DataError(f"{file} is not a readable CSV file (after row {number}): {e}") from e


def _check_separator(rows: "csv.DictReader[str]", file: Path) -> None:
    """Raise DataError for a file whose fields another character separates."""
    name, expected = rows.fieldnames or (), rows.reader.dialect.delimiter
    other = next((sign for sign in ";\t," if len(name) == 1 and sign in name[0]), expected)
    if other != expected:  # a quoted name may contain it
        raise DataError(
            f"{file}: the first line has the single field {name[0]!r}; expected fields separated "
            f"by {expected!r}, as in .{'tsv' if expected == chr(9) else 'csv'} files. Write the "
            f"file with this separator instead of {other!r}"
        )


def _read_arrow(file: Path, label: str, batch_rows: int) -> Iterator[ParsedRow]:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as e:
        raise DataError(
            f"{file}: reading {file.suffix} requires pyarrow; "
            'install it with: pip install "paceline[parquet]"'
        ) from e
    number = 0
    try:
        if _extension(file) == ".parquet":
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(batch_rows)
        else:
            batches = pyarrow.ipc.open_stream(pyarrow.memory_map(str(file)))
        for batch in batches:
            batch.validate(full=True)  # pyarrow trusts what it reads: a damaged file crashes it
            for row in batch.to_pylist():
                number += 1
                yield ParsedRow(f"{label}:{number}", row)
    except (pyarrow.ArrowException, ValueError, OverflowError, TypeError) as e:
        is_parquet = _extension(file) == ".parquet"
        kind = "Parquet file" if is_parquet else "Arrow stream as written by the library datasets"
        raise DataError(f"{file} is not a readable {kind} (after row {number}): {e}") from e
