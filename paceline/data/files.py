"""Rows out of JSON, CSV, parquet and arrow files. A row that cannot be read is reported with its place, never dropped in silence."""

import csv
import glob
import gzip
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.errors import DataError

JSON, CSV, ARROW = (".jsonl", ".ndjson", ".json"), (".csv", ".tsv"), (".parquet", ".arrow")
READABLE = (*JSON, *CSV, *ARROW)


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """One row of a file: the row itself, or why it could not be read."""

    where: str  # "train.jsonl:17"; numbers start at 1
    row: Mapping[str, Any]
    problem: str = ""


def find_files(patterns: tuple[str, ...]) -> list[Path]:
    """The files that paths and glob patterns name, each once, in a stable order."""
    files: dict[Path, None] = {}
    for pattern in patterns:
        plain = Path(pattern).expanduser()
        found = (
            [plain]
            if plain.exists()
            else sorted(Path(p) for p in glob.glob(str(plain), recursive=True))
        )
        if not found:
            raise DataError(
                f"no data file at {pattern!r} (looked from {Path.cwd()}); check data.path"
            )
        for place in found:
            for file in _saved_data_set(place) if place.is_dir() else [place]:
                if _ending(file) not in READABLE:
                    raise DataError(
                        f"{file}: cannot read {file.suffix or 'a file without ending'}; data files end in {_endings()}"
                    )
                files[file] = None
    return list(files)


def read_files(files: list[Path]) -> Iterator[ParsedRow]:
    """All rows, file by file. A file goes by its name, or by its path where another one has the same name."""
    names = Counter(file.name for file in files)
    for file in files:
        label = file.name if names[file.name] == 1 else str(file)
        try:
            if file.stat().st_size == 0:
                raise DataError(f"{file} is empty; expected at least one row")
            yield from (
                _read_arrow(file, label) if _ending(file) in ARROW else _read_text(file, label)
            )
        except OSError as e:
            raise DataError(f"cannot read {file}: {e.strerror or e}") from e
        except (EOFError, zlib.error) as e:
            raise DataError(f"{file} is not a whole gzip file: {e}") from e


def _ending(file: Path) -> str:
    """What it holds, compressed or not: "a.JSONL.gz" is ".jsonl"."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    return (
        suffixes[-2]
        if len(suffixes) == 2 and suffixes[-1] == ".gz" and suffixes[-2] not in ARROW
        else "".join(suffixes[-1:])
    )


def _endings() -> str:
    return f"{', '.join(READABLE)} (text also with .gz)"


def _saved_data_set(folder: Path) -> list[Path]:
    """The files of a data set that the library `datasets` saved there; other folders are refused with what is in them."""
    if (folder / "state.json").is_file():
        try:
            return [
                folder / part["filename"]
                for part in json.loads((folder / "state.json").read_text())["_data_files"]
            ]
        except (ValueError, KeyError, TypeError) as e:
            raise DataError(
                f"{folder / 'state.json'} is not that of a saved data set: {e!r}"
            ) from e
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(str(state.parent) for state in folder.glob("*/state.json"))
        raise DataError(
            f"data.path {str(folder)!r} is a data set of several splits; name one: {' or '.join(splits)}"
        )
    inside = [
        file
        for depth in ("*", "*/*")
        for file in sorted(folder.glob(depth))
        if _ending(file) in READABLE
    ]
    hint = f"{inside[0].parent}/*{''.join(inside[0].suffixes)}" if inside else f"{folder}/*.jsonl"
    raise DataError(f"data.path {str(folder)!r} is a folder; name its files, for example '{hint}'")


def _read_text(file: Path, label: str) -> Iterator[ParsedRow]:
    compressed = file.suffix.lower() == ".gz"
    with gzip.open(file, "rb") if compressed else file.open("rb") as raw:
        content = io.BufferedReader(raw)
        if _ending(file) in CSV:
            yield from _read_csv(content, file, label)
        elif content.peek(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            yield from _read_array(content, file, label)
        else:
            yield from _read_lines(content, label)


def _read_lines(lines: Iterable[bytes], label: str) -> Iterator[ParsedRow]:
    for number, line in enumerate(lines, 1):
        where = f"{label}:{number}"
        if not line.strip():
            continue  # blank lines (the end of many files) are not rows
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as e:
            yield ParsedRow(where, {}, f"not UTF-8 (byte {e.start + 1} of the line)")
        except (json.JSONDecodeError, RecursionError) as e:
            yield ParsedRow(where, {}, f"not JSON ({e})")
        else:
            yield _object(row, where)


def _read_array(content: IO[bytes], file: Path, label: str) -> Iterator[ParsedRow]:
    try:
        rows = json.loads(content.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise DataError(f"{file} begins like a JSON array of rows and is none: {e}") from e
    for number, row in enumerate(rows, 1):
        yield _object(row, f"{label}:{number}")


def _object(row: Any, where: str) -> ParsedRow:
    return (
        ParsedRow(where, row)
        if isinstance(row, dict)
        else ParsedRow(where, {}, f"expected a JSON object, got {type(row).__name__}")
    )


def _read_csv(content: IO[bytes], file: Path, label: str) -> Iterator[ParsedRow]:
    """Columns by the names in the first line; every value is text."""
    csv.field_size_limit(sys.maxsize)
    lines = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
    rows = csv.DictReader(lines, delimiter="\t" if _ending(file) == ".tsv" else ",", strict=True)
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            fits = None not in row and None not in row.values()
            yield ParsedRow(
                f"{label}:{number}",
                row,
                ""
                if fits
                else f"has not the {len(rows.fieldnames or ())} fields of the first line",
            )
    except (csv.Error, UnicodeDecodeError) as e:
        raise DataError(f"{file} is not a readable CSV file (after row {number}): {e}") from e


def _read_arrow(file: Path, label: str) -> Iterator[ParsedRow]:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as e:
        raise DataError(
            f'{file}: reading {file.suffix} needs pyarrow; install it with: pip install "paceline[parquet]"'
        ) from e
    number = 0
    try:
        stored = pyarrow.parquet.ParquetFile(file) if _ending(file) == ".parquet" else None
        for batch in (
            stored.iter_batches()
            if stored
            else pyarrow.ipc.open_stream(pyarrow.memory_map(str(file)))
        ):
            for row in batch.to_pylist():
                number += 1
                yield ParsedRow(f"{label}:{number}", row)
    except pyarrow.ArrowException as e:
        kind = (
            "parquet file"
            if _ending(file) == ".parquet"
            else "arrow stream, as the library datasets writes it"
        )
        raise DataError(f"{file} is not a readable {kind} (after row {number}): {e}") from e
