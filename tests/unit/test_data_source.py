"""Prompts given by the program or a custom source: datasets, streams, and how a run resumes."""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.custom_source import rows as example_rows
from paceline.config import load_config
from paceline.data.prompts import DataSettings, PromptSource
from paceline.data.source import Prompts, open_source
from paceline.data.stream import PromptStream
from paceline.data.tiny import make_tokenizer
from paceline.errors import ConfigError, DataError
from paceline.types import Group
from tests.exceptions import Speechless

TOKENIZER = make_tokenizer()
ROWS = [{"prompt": f"p{i}", "answer": str(i)} for i in range(5)]


def given(rows: Any, **settings: Any) -> Prompts:
    return open_source(DataSettings(**settings), TOKENIZER, 0, rows)


def custom(source: Any, **settings: Any) -> Prompts:
    return open_source(DataSettings(source=source, **settings), TOKENIZER, 7)


def texts(source: Prompts, positions: Sequence[int]) -> list[str]:
    return [source[seq].row["prompt"] for seq in positions]


def trained(source: Prompts, seq: int) -> None:
    source.observe([Group(seq, source[seq], (), 0.0, 0.0)])


def endless(bad: int = 0) -> Iterator[dict[str, Any]]:
    """Yield rows p0, p1 ...; every `bad`-th has no prompt."""
    for i in itertools.count():
        yield {"id": i} if bad and i % bad == bad - 1 else {"prompt": f"p{i}"}


def saved(source: Prompts) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(source.state()))
    return state


class PandasFrame:
    """As in pandas: iterating yields the names of the columns."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    def iterrows(self) -> Iterator[Any]:
        return enumerate(self._rows)

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return self._rows


class PolarsFrame(list[Any]):
    """As in polars: iterating yields columns."""

    def to_dicts(self) -> list[dict[str, Any]]:
        return ROWS


# -- datasets


@pytest.mark.parametrize("frame", [PandasFrame(ROWS), PolarsFrame([["p0"], ["0"]])])
def test_frame_is_read_by_rows(frame: Any) -> None:
    for source in (given(frame), custom(lambda: frame)):
        assert len(source) == 5 and sorted(texts(source, range(5))) == [f"p{i}" for i in range(5)]


def test_arrays_in_frame_become_lists() -> None:
    messages: Any = np.empty(1, object)
    messages[0] = {"role": "user", "content": "p0", "tags": np.array(["a", "b"], object)}
    nested: Any = np.empty(2, object)
    nested[:] = [np.array([1, 2]), np.array([3])]
    frame = PandasFrame([{"prompt": messages, "info": {"nested": nested}}])
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    row = open_source(DataSettings(), tokenizer, 0, frame)[0].row
    assert row["prompt"] == [{"role": "user", "content": "p0", "tags": ["a", "b"]}]
    assert row["info"] == {"nested": [[1, 2], [3]]}


@pytest.mark.parametrize("rows", [ROWS, tuple(ROWS)])
def test_rows_with_length_are_dataset(rows: Any) -> None:
    source = given(rows)
    assert isinstance(source, PromptSource) and len(source) == 5
    assert sorted(texts(source, range(5))) == ["p0", "p1", "p2", "p3", "p4"]
    assert texts(source, range(5)) != texts(source, range(5, 10))


def test_saved_dataset_object_is_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    assert len(given(datasets.Dataset.from_list(ROWS))) == 5


def test_function_that_returns_list_is_dataset() -> None:
    source = custom(lambda: ROWS, shuffle=False)
    assert texts(source, [0, 5]) == ["p0", "p0"] and source[0].uid == "row 1"


def test_rows_of_program_replace_those_of_settings() -> None:
    assert len(given(ROWS, task="copy")) == 5


def test_wrong_column_in_given_rows_is_named() -> None:
    with pytest.raises(
        DataError, match=r"no column 'question' in the rows given by the program; c"
    ):
        given(ROWS, prompt_key="question")


def test_bad_given_row_is_named_by_number() -> None:
    with pytest.raises(
        DataError, match=r"row 2: expected a dict of columns, got str; write .*: text}"
    ):
        given([ROWS[0], "text"])


@pytest.mark.parametrize("rows", ["prompts.jsonl", 3, {"train": ROWS}])
def test_what_is_not_rows_is_rejected(rows: Any) -> None:
    with pytest.raises(DataError, match="expected a list of dicts"):
        given(rows)


def test_limit_makes_dataset_of_first_rows() -> None:
    source = given(endless(), limit=3)
    assert isinstance(source, PromptSource) and len(source) == 3


# -- streams


def test_stream_is_read_lazily_in_order() -> None:
    taken: list[int] = []

    def rows() -> Iterator[dict[str, Any]]:
        for i, row in enumerate(endless()):
            taken.append(i)
            yield row

    source = custom(rows)
    assert isinstance(source, PromptStream)
    assert texts(source, range(4)) == ["p0", "p1", "p2", "p3"] and taken == [0, 1, 2, 3]
    assert source[2].uid == "row 3"


def test_stream_gets_seed_of_run() -> None:
    assert custom(example_rows)[3].row == next(itertools.islice(example_rows(7), 3, None))


def test_stream_forgets_prompts_that_were_trained_on() -> None:
    source = custom(endless)
    for seq in range(100):
        trained(source, seq)
    assert isinstance(source, PromptStream) and not source._held


@pytest.mark.parametrize("bad", [0, 3])
def test_resumed_stream_continues_exactly(bad: int) -> None:
    settings: dict[str, Any] = {"on_bad_row": "skip"} if bad else {}
    first = custom(lambda: endless(bad), **settings)
    expected = texts(first, range(20))
    for seq in range(8):
        trained(first, seq)
    second = custom(lambda: endless(bad), **settings)
    second.load_state(saved(first))
    assert second.fingerprint == first.fingerprint
    assert texts(second, [8, 10, 19]) == [expected[seq] for seq in (8, 10, 19)]
    assert texts(second, range(20, 24)) == texts(first, range(20, 24))


def test_resumed_stream_does_not_tokenize_what_it_skips() -> None:
    first = custom(endless)
    texts(first, range(50))
    second = custom(endless)
    second.load_state(saved(first))
    assert isinstance(second, PromptStream)
    calls: list[Any] = []
    tokenize = second._tokenizer.tokenize
    second._tokenizer.tokenize = lambda reads: calls.append(reads) or tokenize(reads)  # type: ignore[func-returns-value, method-assign]
    assert texts(second, [49]) == ["p49"] and len(calls) == 1


def test_generator_of_program_is_skipped_to_where_run_stopped() -> None:
    first = given(endless())
    expected = texts(first, range(6))
    second = given(endless())
    second.load_state(saved(first))
    assert texts(second, [4, 5]) == expected[4:]


class Service:
    """A stream that restores itself."""

    def __init__(self) -> None:
        self.position, self.made = 0, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            self.position += 1
            self.made += 1
            yield {"prompt": f"s{self.position - 1}"}

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_stream_with_state_resumes_without_replay() -> None:
    first = given(Service())
    texts(first, range(100))
    trained(first, 97)
    service = Service()
    second = given(service)
    second.load_state(saved(first))
    assert texts(second, [98, 99, 100, 101]) == ["s98", "s99", "s100", "s101"]
    assert service.made == 3, "the first row, and two new ones"


def test_stream_with_state_needs_rows_for_json() -> None:
    class Odd(Service):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield {"prompt": "p", "set": {1}}

    with pytest.raises(DataError, match="expected JSON values"):
        given(Odd()).state()


def test_finite_stream_starts_again_as_new_epoch() -> None:
    source = custom(lambda: iter(ROWS))
    assert texts(source, range(7)) == ["p0", "p1", "p2", "p3", "p4", "p0", "p1"]
    assert source[6].uid == "row 2"


def test_generator_that_ends_too_early_is_error() -> None:
    source = given(row for row in ROWS)
    with pytest.raises(DataError, match="ended after 5 rows, but the run needs more"):
        texts(source, range(6))


@pytest.mark.parametrize("rows", [lambda: iter([]), list])
def test_source_without_rows_is_error(rows: Any) -> None:
    with pytest.raises(DataError, match=r"no rows|no usable rows"):
        custom(rows)


def test_stream_of_bad_rows_ends_with_error() -> None:
    with pytest.raises(DataError, match="all 2 were left out"):
        custom(lambda: iter([{"prompt": 1}, {"prompt": 2}]), on_bad_row="skip")


def test_bad_row_of_stream_is_named_by_number() -> None:
    source = custom(lambda: endless(3))
    with pytest.raises(DataError, match=r"row 3: no 'prompt' \(data.prompt_key\)"):
        texts(source, range(4))


def test_wrong_column_in_stream_is_named_before_run() -> None:
    with pytest.raises(
        DataError, match=r"no column 'q' in data.source = .*; columns found: prompt"
    ):
        custom(endless, prompt_key="q")


def test_exception_in_stream_names_source() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield ROWS[0]
        raise OSError("connection lost")

    source = custom(rows)
    with pytest.raises(DataError, match=r"rows' raised OSError: connection lost \(after 1 rows\)"):
        texts(source, [1])


@pytest.mark.parametrize("error", [ZeroDivisionError, Speechless, SystemExit])
def test_exception_in_source_function_names_source(error: type[BaseException]) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(DataError, match=f"fails' raised {error.__name__}: "):
        custom(fails)


def test_stream_that_ends_program_is_data_error() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield ROWS[0]
        sys.exit(0)

    with pytest.raises(DataError, match=r"rows' raised SystemExit: 0 \(after 1 rows\)"):
        texts(custom(rows), [1])


def test_source_with_other_parameter_is_config_error() -> None:
    with pytest.raises(ConfigError, match=r"has the parameter 'path'; expected only .* seed"):
        custom(lambda path: [])


def test_stream_has_no_length() -> None:
    with pytest.raises(DataError, match=r"set data\.limit"):
        len(custom(endless))


def test_curriculum_rejects_stream() -> None:
    with pytest.raises(ConfigError, match="needs a known number of rows"):
        custom(endless, curriculum="adaptive")


# -- settings


def test_source_on_command_line_replaces_task_of_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[data]\ntask = "copy"')
    data = load_config(recipe, ["data.source=examples/custom_source.py:rows"]).data
    assert data.task is None and str(data.source) == "examples/custom_source.py:rows"


def test_source_excludes_task() -> None:
    with pytest.raises(ConfigError, match=r"task = 'copy:5' and source = .* are both set"):
        load_config(None, ["data.source=examples/custom_source.py:rows", "data.task=copy:5"])


def test_missing_source_file_is_found_in_settings() -> None:
    with pytest.raises(ConfigError, match=r"data\.source: no file 'gone\.py'"):
        load_config(None, ["data.source=gone.py:f"])
