"""Rows of the datasets that a TRL script passes."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from paceline.data.rows import LIKELY_PROMPT_KEYS, likely_column
from paceline.errors import ConfigError

Row = Mapping[str, Any]


def dataset_rows(dataset: str | Iterable[Row], limit: int | None = None) -> list[dict[str, Any]]:
    if isinstance(dataset, Mapping):
        names = ", ".join(map(repr, dataset))
        raise ConfigError(f"the dataset has the splits {names}; pass one of them")
    if isinstance(dataset, str):
        raise ConfigError(
            f"the dataset is the text {dataset!r}; expected rows, for example of load_dataset"
        )
    rows = [dict(_mapping(row)) for row in islice(dataset, limit)]
    if not rows:
        raise ConfigError("the dataset has no rows")
    check_columns(rows[0], "the dataset")
    return rows


def _mapping(row: Any) -> Row:
    if isinstance(row, Mapping):
        return row
    raise ConfigError(
        f"a row of the dataset is {type(row).__name__}; expected a dict of columns. From a data "
        "frame, pass datasets.Dataset.from_pandas(frame); from texts, [{'prompt': text}, ...]"
    )


def check_columns(row: Row, dataset: str) -> None:
    columns = [*map(str, row)]
    if "prompt" not in columns:
        likely = likely_column("prompt", columns, LIKELY_PROMPT_KEYS)
        raise ConfigError(
            f"{dataset} has no column 'prompt', but {', '.join(columns)}. Rename the column with "
            f"the prompt, for example rename_column({likely!r}, 'prompt')"
        )
    if {"image", "images"} & {*columns}:
        raise ConfigError(f"{dataset} has images; only text models can be trained")
