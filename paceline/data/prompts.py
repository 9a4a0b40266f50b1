"""Dataset of prompts from files, a built-in task or given rows, with random access.

Without a curriculum, `source[seq]` is a pure function of (settings, seed, seq), so one integer is
the cursor of a run and resuming is exact.
"""

import hashlib
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from paceline.data.curriculum import load_curriculum
from paceline.data.files import ParsedRow, find_files, read_files
from paceline.data.fingerprint import stable_text
from paceline.data.rows import BadRow, RowReader, RowTokenizer, TokenizedRow
from paceline.data.tasks import get_task
from paceline.errors import ConfigError, DataError
from paceline.plugins import Plugin
from paceline.settings import Settings
from paceline.types import Group, Prompt

if TYPE_CHECKING:  # importing transformers takes seconds, and --help needs only the settings
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Reads = Sequence[ParsedRow]
TokenizerKind = Callable[[Any, "PreTrainedTokenizerBase"], RowReader]
GROUP = "paceline.sources"  # entry points of data.source
SHOWN_BAD_ROWS = 5  # listed in a message; the rest are counted


class RowSettings(Settings):
    """Rows of a dataset: where they come from and how they become text."""

    task: str | None = None
    """Built-in task, "name" or "name:difficulty", for example "sort:5". Set one of task, path and
    source."""
    path: str | tuple[str, ...] | None = None
    """Data files: a path, a glob pattern, or a list of them. Formats: JSONL, JSON, CSV, TSV,
    Parquet, or a directory saved by the library `datasets`."""
    source: Plugin | None = None
    """Custom source of rows: "file.py:function". The function returns a list of dicts, or yields
    them one by one, without an end if you like."""
    prompt_key: str = "prompt"
    """Column with the prompt: text or a list of chat messages."""
    shuffle: bool = True
    """Shuffle the rows in every epoch. Each row occurs once per epoch."""
    limit: int | None = Field(default=None, ge=1)
    """Number of rows to use, from the first. Default: all rows; 8192 rows per epoch for a task."""
    chat: bool | None = None
    """Render prompts with the tokenizer's chat template; text becomes one user message.
    Default: true if the tokenizer has a chat template."""
    system: str | None = None
    """System message for prompts without one. Requires a chat template."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """Reaction to a row that cannot be used: end the run with an error, or leave the row out."""

    @field_validator("task")
    @classmethod
    def _known_task(cls, spec: str | None) -> str | None:
        return spec if spec is None else get_task(spec).spec

    @field_validator("source")
    @classmethod
    def _known_source(cls, source: Plugin | None) -> Plugin | None:
        if source is not None:
            source.check(GROUP)
        return source

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        origins = {"task": self.task, "path": self.path, "source": self.source}
        given = [f"{name} = {value!r}" for name, value in origins.items() if value is not None]
        if len(given) > 1:
            both = "both" if len(given) == 2 else "all"
            raise ValueError(f"{' and '.join(given)} are {both} set; keep only one of them")
        return self

    @property
    def has_origin(self) -> bool:
        """Whether the settings say where the rows come from."""
        return (self.task, self.path, self.source) != (None, None, None)


class DataSettings(RowSettings):
    answer_key: str | None = None
    """Column with the reference answer, which the reward function reads as row["answer"]; "a.b" is
    field b of column a. Default: the column "answer", if there is one. The reward function gets the
    whole row."""
    max_prompt_length: int = Field(default=512, ge=1)
    """Maximum prompt length in tokens. A longer prompt is a bad row."""
    curriculum: str | None = None
    """Order of rows by the rewards of the model: "adaptive", or a custom class as "file.py:Class".
    Default: every row once per epoch."""


class PromptSource:
    """All prompts of a run, as an endless sequence.

    Every epoch has each row once, in a different order per epoch if shuffling is on. A curriculum
    replaces this order.
    """

    bad_rows: tuple[BadRow, ...]
    """Rows left out because on_bad_row = "skip"."""
    fingerprint: str
    """Hash of all prompts and rows; a run resumes only on the same data."""

    def __init__(
        self,
        settings: RowSettings,
        tokenizer: "PreTrainedTokenizerBase",
        seed: int,
        given: tuple[str, Reads] | None = None,
        kind: TokenizerKind = RowTokenizer,
    ) -> None:
        """`given`: rows that replace those of the settings, and their name in messages.

        `kind`: turns rows into tokens; default: into those of prompts.
        """
        self._settings, self._seed = settings, seed
        origin, reads = given or _read(settings, seed)
        row_tokenizer = kind(settings, tokenizer)
        if settings.task is None or given:
            row_tokenizer.check_columns((read.row for read in reads), origin)
        self._rows, self.bad_rows = _load(settings, row_tokenizer, origin, reads)
        self.fingerprint = _fingerprint(self._rows)
        order = curriculum_of(settings)
        self._curriculum = load_curriculum(order, len(self._rows), seed) if order else None
        self._number = {row.uid: number for number, row in enumerate(self._rows)}
        # Cache several epochs, because the prompts in flight of an async run span two.
        self._order = lru_cache(maxsize=4)(self._make_order)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, seq: int) -> Prompt:
        return self.row(seq).prompt()

    def row(self, seq: int) -> TokenizedRow:
        if seq < 0:
            raise IndexError(f"prompt {seq}: positions start at 0")
        return self._rows[self._row_at(seq)]

    def hold_out(self, count: int) -> list[TokenizedRow]:
        """Take the last rows out of the source, before its first use, and return them."""
        kept = len(self._rows) - count
        held_out, self._rows = self._rows[kept:], self._rows[:kept]
        return held_out

    def rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Return every row with its location."""
        return ((row.where, row.row) for row in self._rows)

    @property
    def longest(self) -> int:
        return max(len(row.tokens) for row in self._rows)

    @property
    def highest_token(self) -> int:
        return max(int(row.tokens.max()) for row in self._rows)

    def observe(self, groups: Sequence[Group]) -> None:
        """Report groups that were trained on to the curriculum, if there is one."""
        if self._curriculum:
            for group in groups:
                self._curriculum.observe(
                    self._number[group.prompt.uid],
                    [trajectory.total_reward for trajectory in group.trajectories],
                )

    def forget(self, newest: int) -> None:
        """Do nothing: the rows stay in memory for the next epoch."""

    def state(self) -> dict[str, Any]:
        return self._curriculum.state() if self._curriculum else {}

    def load_state(self, state: dict[str, Any]) -> None:
        if self._curriculum:
            self._curriculum.load_state(state)

    def _row_at(self, seq: int) -> int:
        if self._curriculum:
            picked = self._curriculum.pick(seq)
            try:
                row = operator.index(picked)  # also of numpy and torch
            except TypeError:
                row = -1
            if not 0 <= row < len(self._rows):
                raise DataError(
                    f"data.curriculum = {curriculum_of(self._settings)!r} picked row {picked!r}; "
                    f"expected an integer from 0 to {len(self._rows) - 1}"
                )
            return row
        epoch, position = divmod(seq, len(self._rows))
        return int(self._order(epoch)[position]) if self._settings.shuffle else position

    def _make_order(self, epoch: int) -> NDArray[np.intp]:
        # Raw PCG64 words are the same in every numpy version; `Generator.permutation` is not.
        keys = np.random.PCG64([self._seed, epoch]).random_raw(len(self._rows))
        return np.argsort(keys, kind="stable")


def curriculum_of(settings: RowSettings) -> str | None:
    return settings.curriculum if isinstance(settings, DataSettings) else None


def _load(
    settings: RowSettings, tokenizer: RowReader, origin: str, reads: Reads
) -> tuple[list[TokenizedRow], tuple[BadRow, ...]]:
    rows: dict[str, TokenizedRow] = {}
    bad = []
    for row in tokenizer.tokenize(reads):
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        while row.uid in rows:  # for example, several questions may share the id of their passage
            row = replace(row, uid=f"{row.uid} ({row.where})")
        rows[row.uid] = row
    _report(bad, len(rows), origin, settings)
    return list(rows.values()), tuple(bad)


def _read(settings: RowSettings, seed: int) -> tuple[str, Reads]:
    """Return the origin of the rows, and all rows."""
    if settings.task is not None:
        task = get_task(settings.task)
        return task.spec, [
            ParsedRow(f"{task.spec}:{i}", task.row(i, seed))
            for i in range(settings.limit or task.size)
        ]
    if settings.path is None:
        raise ConfigError(
            "there are no prompts: set data.task (for example 'sort:5'), data.path (for example "
            "'prompts.jsonl') or data.source (for example 'rows.py:function')"
        )
    patterns = (settings.path,) if isinstance(settings.path, str) else settings.path
    files = find_files(patterns)
    origin = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
    return origin, list(islice(read_files(files), settings.limit))


def _report(bad: Sequence[BadRow], good: int, origin: str, settings: RowSettings) -> None:
    """Raise DataError for bad rows, or if no row is left; log the rows that are left out."""
    shown = "".join(f"\n  {row}" for row in bad[:SHOWN_BAD_ROWS]) + (
        f"\n  ... and {len(bad) - SHOWN_BAD_ROWS} more" if len(bad) > SHOWN_BAD_ROWS else ""
    )
    if bad and settings.on_bad_row == "fail":
        advice = "Fix them, or leave them out with data.on_bad_row = 'skip'."
        raise DataError(
            f"{len(bad)} of {len(bad) + good} rows of {origin} cannot be used:{shown}\n{advice}"
        )
    if not good:
        raise DataError(f"no usable rows in {origin}{':' if bad else ''}{shown}")
    if bad:
        log.warning("left out %d of %d rows of %s:%s", len(bad), len(bad) + good, origin, shown)


def _fingerprint(rows: Sequence[TokenizedRow]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(stable_text([row.uid, row.text, row.row]).encode())
    return digest.hexdigest()
