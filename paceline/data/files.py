"""Rows out of JSONL and parquet files. A row that cannot be read is reported with its file and number, never dropped in silence."""

import codecs
import glob
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DataError

JSONL = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, slots=True)
class Read:
    """One row of a file: the row itself, or why it could not be read."""

    where: str  # "train.jsonl:17"; numbers start at 1
    row: Mapping[str, Any]
    problem: str = ""


def find_files(patterns: tuple[str, ...]) -> list[Path]:
    """The files that paths and glob patterns name, each once, in a stable order."""
    files: dict[Path, None] = {}
    for pattern in patterns:
        plain = Path(pattern).expanduser()
        found = [plain] if plain.exists() else sorted(Path(p) for p in glob.glob(str(plain), recursive=True))
        if not found:
            raise DataError(f"no data file at {pattern!r} (looked from {Path.cwd()}); check data.path")
        for file in found:
            if file.is_dir():
                raise DataError(f"data.path {str(file)!r} is a folder; name its files, for example '{file}/*.jsonl'")
            if file.suffix.lower() not in (*JSONL, ".parquet"):
                raise DataError(f"{file}: cannot read {file.suffix or 'a file without ending'}; data files end in .jsonl or .parquet")
            files[file] = None
    return list(files)


def read_files(files: list[Path]) -> Iterator[Read]:
    """All rows, file by file. A file goes by its name, or by its path where another one has the same name."""
    names = Counter(file.name for file in files)
    for file in files:
        label = file.name if names[file.name] == 1 else str(file)
        try:
            if file.stat().st_size == 0:
                raise DataError(f"{file} is empty; expected at least one row")
            yield from _read_jsonl(file, label) if file.suffix.lower() in JSONL else _read_parquet(file, label)
        except OSError as e:
            raise DataError(f"cannot read {file}: {e.strerror or e}") from e


def _read_jsonl(file: Path, label: str) -> Iterator[Read]:
    with file.open("rb") as lines:
        if lines.peek(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            raise DataError(f"{file} is one JSON array; expected JSONL, a row per line: jq -c '.[]' {file} > {file.with_suffix('.jsonl')}")
        for number, line in enumerate(lines, 1):
            where = f"{label}:{number}"
            if not line.strip():
                continue  # blank lines (the end of many files) are not rows
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as e:
                yield Read(where, {}, f"not UTF-8 (byte {e.start + 1} of the line)")
            except (json.JSONDecodeError, RecursionError) as e:
                yield Read(where, {}, f"not JSON ({e})")
            else:
                yield Read(where, row) if isinstance(row, dict) else Read(where, {}, f"expected a JSON object, got {type(row).__name__}")


def _read_parquet(file: Path, label: str) -> Iterator[Read]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as e:
        raise DataError(f'{file}: reading parquet needs pyarrow; install it with: pip install "paceline[parquet]"') from e
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield Read(f"{label}:{number}", row)
    except pyarrow.ArrowException as e:
        raise DataError(f"{file} is not a readable parquet file (after row {number}): {e}") from e
