"""The prompts of a run, wherever they come from: files, a task, a custom source or the program."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.data.prompts import (
    GROUP,
    PromptSource,
    RowSettings,
    TokenizerKind,
    curriculum_of,
)
from paceline.data.rows import RowTokenizer
from paceline.data.stream import PromptStream, RowStream
from paceline.errors import ConfigError, DataError, PacelineError
from paceline.plugins import FAILURES, Plugin, PluginError, call_by_name
from paceline.printable import describe_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompts = PromptSource | PromptStream


def open_source(
    settings: RowSettings,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    rows: Iterable[Any] | None = None,
    kind: TokenizerKind = RowTokenizer,
) -> Prompts:
    """Open the rows, as prompts or as what `kind` makes of them. `rows` of the program replace
    those of the settings.

    Rows with a length are a dataset; others are a stream, unless data.limit selects the first ones.
    """
    if rows is not None:
        stream = _given(rows)
    elif settings.source is not None:
        stream = _custom(settings.source, seed)
    else:
        return PromptSource(settings, tokenizer, seed, kind=kind)
    opened = stream.open()
    if _has_length(opened) or settings.limit:
        try:
            found = list(islice(opened, settings.limit))
        except FAILURES as e:
            raise DataError(f"{stream.origin} raised {describe_error(e)}") from e
        reads = [stream.parsed(row, number) for number, row in enumerate(found, 1)]
        return PromptSource(settings, tokenizer, seed, (stream.origin, reads), kind)
    if curriculum := curriculum_of(settings):
        raise ConfigError(
            f"data.curriculum = {curriculum!r} needs a known number of rows, but "
            f"{stream.origin} is a stream; set data.limit, or remove data.curriculum"
        )
    return PromptStream(settings, stream, kind(settings, tokenizer), opened)


def _given(rows: Iterable[Any]) -> RowStream:
    origin = "the rows given by the program"
    rows = _records(rows)
    _check_iterable(rows, origin)
    return RowStream(origin, lambda: rows, reopens=not isinstance(rows, Iterator))


def _custom(plugin: Plugin, seed: int) -> RowStream:
    origin = f"data.source = {str(plugin)!r}"
    try:
        function = plugin.load(GROUP)
    except PluginError as problem:
        raise ConfigError(f"{origin}: {problem}") from problem

    def open_rows() -> Iterable[Any]:
        rows = _records(_call(function, seed, origin))
        _check_iterable(rows, origin)
        return rows

    return RowStream(origin, open_rows, reopens=True)


def _call(function: Callable[..., Any], seed: int, origin: str) -> Any:
    try:
        return call_by_name(function, {"seed": seed})
    except PluginError as problem:
        raise ConfigError(f"{origin} {problem}") from problem
    except PacelineError:
        raise
    except FAILURES as e:
        raise DataError(f"{origin} raised {describe_error(e)}") from e


def _records(rows: Any) -> Any:
    """Return the rows of a frame of pandas or polars, whose iterators yield columns."""
    if hasattr(rows, "to_dicts"):
        return rows.to_dicts()
    if hasattr(rows, "to_dict") and hasattr(rows, "iterrows"):
        return _without_arrays(rows.to_dict("records"))
    return rows


def _without_arrays(value: Any) -> Any:
    """Return a value with lists in place of arrays, as which pandas reads lists from Parquet."""
    if isinstance(value, np.ndarray):
        return _without_arrays(value.tolist())  # an array of objects may contain arrays
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_arrays(item) for item in value]
    return value


def _check_iterable(rows: Any, origin: str) -> None:
    expected = "expected a list of dicts, an iterable of them, a datasets.Dataset or a data frame"
    if isinstance(rows, Mapping):
        raise DataError(
            f"{origin}: got {type(rows).__name__} with {', '.join(map(str, list(rows)[:5]))}; "
            f"{expected}. Select one, for example rows[{next(iter(rows), 'train')!r}]"
        )
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise DataError(f"{origin}: got {type(rows).__name__}; {expected}")


def _has_length(rows: Any) -> bool:
    try:
        return len(rows) >= 0
    except TypeError:
        return False
