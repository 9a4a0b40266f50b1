"""Stream of prompts from data files or a built-in task, with random access.

Without a curriculum, `source[seq]` is a pure function of (settings, seed, seq), so one integer is
the cursor of a run and resuming is exact.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from paceline.data import chat
from paceline.data.curriculum import load_curriculum
from paceline.data.files import ParsedRow, find_files, read_files
from paceline.data.tasks import get_task
from paceline.errors import ConfigError, DataError
from paceline.settings import Settings
from paceline.types import Group, Prompt

if TYPE_CHECKING:  # importing transformers takes seconds, and --help needs only the settings
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

LIKELY_PROMPT_KEYS = (
    "prompt",
    "question",
    "problem",
    "messages",
    "conversation",
    "conversations",
    "instruction",
    "query",
    "input",
    "text",
)
TOKENIZER_BATCH = 1024  # texts
SHOWN_BAD_ROWS = 5  # listed in a message; the rest are counted


class DataSettings(Settings):
    task: str | None = None
    """Built-in task, "name" or "name:difficulty", for example "sort:5". Set either task or path."""
    path: str | tuple[str, ...] | None = None
    """Prompt files: a path, a glob pattern, or a list of them. Formats: JSONL, JSON, CSV, TSV,
    Parquet, or a directory saved by the library `datasets`."""
    prompt_key: str = "prompt"
    """Column with the prompt: text or a list of chat messages. The reward function gets the whole
    row."""
    answer_key: str | None = None
    """Column with the reference answer, which the reward function reads as row["answer"]; "a.b" is
    field b of column a. Default: the column "answer", if there is one."""
    max_prompt_length: int = Field(default=512, ge=1)
    """Maximum prompt length in tokens. A longer prompt is a bad row."""
    shuffle: bool = True
    """Shuffle the rows in every epoch. Each row occurs once per epoch."""
    curriculum: str | None = None
    """Order of rows by the rewards of the model: "adaptive", or a custom class as "file.py:Class".
    Default: every row once per epoch."""
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

    @model_validator(mode="after")
    def _task_or_path(self) -> Self:
        if self.task is not None and self.path is not None:
            raise ValueError(
                f"task = {self.task!r} and path = {self.path!r} are both set; remove one of them"
            )
        return self


@dataclass(frozen=True, slots=True)
class BadRow:
    where: str  # file and row number
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


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
        self, settings: DataSettings, tokenizer: "PreTrainedTokenizerBase", seed: int
    ) -> None:
        self._settings, self._seed = settings, seed
        self._rows, self.bad_rows = _load(settings, tokenizer, seed)
        self.fingerprint = _fingerprint(self._rows)
        self._curriculum = (
            load_curriculum(settings.curriculum, len(self._rows), seed)
            if settings.curriculum
            else None
        )
        self._number = {row.uid: number for number, row in enumerate(self._rows)}
        # Cache several epochs, because the prompts in flight of an async run span two.
        self._order = lru_cache(maxsize=4)(self._make_order)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, seq: int) -> Prompt:
        if seq < 0:
            raise IndexError(f"prompt {seq}: positions start at 0")
        row = self._rows[self._row_at(seq)]
        return Prompt(row.uid, tuple(row.tokens.tolist()), row.text, row.row)

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

    def state(self) -> dict[str, Any]:
        return self._curriculum.state() if self._curriculum else {}

    def load_state(self, state: dict[str, Any]) -> None:
        if self._curriculum:
            self._curriculum.load_state(state)

    def _row_at(self, seq: int) -> int:
        if self._curriculum:
            row = self._curriculum.pick(seq)
            if not (isinstance(row, int) and 0 <= row < len(self._rows)):
                raise DataError(
                    f"data.curriculum = {self._settings.curriculum!r} picked row {row!r}; "
                    f"expected an integer from 0 to {len(self._rows) - 1}"
                )
            return row
        epoch, position = divmod(seq, len(self._rows))
        return int(self._order(epoch)[position]) if self._settings.shuffle else position

    def _make_order(self, epoch: int) -> NDArray[np.intp]:
        # Raw PCG64 words are the same in every numpy version; `Generator.permutation` is not.
        keys = np.random.PCG64([self._seed, epoch]).random_raw(len(self._rows))
        return np.argsort(keys, kind="stable")


class _Unusable(Exception):
    """The reason why a row cannot become a prompt."""


@dataclass(frozen=True, slots=True)
class _Row:
    uid: str
    where: str
    text: str
    tokens: NDArray[np.int32]
    row: Mapping[str, Any]


def _load(
    settings: DataSettings, tokenizer: "PreTrainedTokenizerBase", seed: int
) -> tuple[list[_Row], tuple[BadRow, ...]]:
    use_chat = _use_chat(settings, tokenizer)
    origin, reads = _read(settings, seed)
    problems: dict[int, str] = {}
    texts: dict[int, str] = {}
    given: dict[int, Mapping[str, Any]] = {}
    for i, read in enumerate(reads):
        try:
            text = _text(read, settings, tokenizer, use_chat)
            given[i], texts[i] = _with_answer(read.row, settings.answer_key), text
        except (_Unusable, TemplateError) as e:
            problems[i] = str(e)
        except (TypeError, ValueError, LookupError, AttributeError) as e:
            problems[i] = f"the chat template failed: {type(e).__name__}: {e}"
    rows: dict[str, _Row] = {}
    for (i, text), tokens in zip(
        texts.items(), _tokens(list(texts.values()), tokenizer, not use_chat), strict=True
    ):
        read = reads[i]
        name = read.row.get("id")
        uid = read.where if name is None else str(name)
        if uid in rows:  # for example, several questions may share the id of their passage
            uid = f"{uid} ({read.where})"
        if not 0 < len(tokens) <= settings.max_prompt_length:
            problems[i] = (
                f"the prompt has {len(tokens)} tokens; "
                f"data.max_prompt_length = {settings.max_prompt_length}"
            )
        else:
            rows[uid] = _Row(uid, read.where, text, tokens, given[i])
    bad = tuple(BadRow(reads[i].where, problems[i]) for i in sorted(problems))
    _report(bad, len(rows), origin, settings)
    return list(rows.values()), bad


def _read(settings: DataSettings, seed: int) -> tuple[str, Sequence[ParsedRow]]:
    """Return the origin of the rows, and all rows."""
    if settings.task is not None:
        task = get_task(settings.task)
        return task.spec, [
            ParsedRow(f"{task.spec}:{i}", task.row(i, seed))
            for i in range(settings.limit or task.size)
        ]
    if settings.path is None:
        raise ConfigError(
            "there are no prompts: set data.task (for example 'sort:5') "
            "or data.path (for example 'prompts.jsonl')"
        )
    patterns = (settings.path,) if isinstance(settings.path, str) else settings.path
    files = find_files(patterns)
    origin = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
    reads = list(islice(read_files(files), settings.limit))
    columns = dict.fromkeys(name for read in reads for name in read.row)
    if columns and settings.prompt_key not in columns:
        likely = next((name for name in LIKELY_PROMPT_KEYS if name in columns), "NAME")
        raise DataError(
            f"no column {settings.prompt_key!r} in {origin}; columns found: {', '.join(columns)}. "
            f"Select the prompt column, for example data.prompt_key={likely}"
        )
    return origin, reads


def _use_chat(settings: DataSettings, tokenizer: "PreTrainedTokenizerBase") -> bool:
    use_chat = chat.has_template(tokenizer) if settings.chat is None else settings.chat
    if use_chat and not chat.has_template(tokenizer):
        raise ConfigError(
            "data.chat = true, but the model's tokenizer has no chat template; "
            "remove data.chat or use a chat model"
        )
    if settings.system is not None and not use_chat:
        raise ConfigError(
            "data.system is set, but prompts are not rendered with a chat template; "
            "remove data.system or use a chat model"
        )
    return use_chat


def _text(
    read: ParsedRow, settings: DataSettings, tokenizer: "PreTrainedTokenizerBase", use_chat: bool
) -> str:
    """Return the prompt of a row as the text the model reads."""
    key = settings.prompt_key
    if read.problem:
        raise _Unusable(read.problem)
    if key not in read.row:
        raise _Unusable(
            f"no {key!r} (data.prompt_key); "
            f"the row has {', '.join(map(repr, read.row)) or 'no columns'}"
        )
    prompt = read.row[key]
    if not isinstance(prompt, str | list):
        raise _Unusable(
            f"{key!r} is {type(prompt).__name__}; expected text or a list of chat messages"
        )
    if isinstance(prompt, list) and not use_chat:
        raise _Unusable(
            f"{key!r} is a list of chat messages, "
            "but data.chat is false or the tokenizer has no chat template"
        )
    problem = chat.message_problem(
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    )
    if problem:
        raise _Unusable(f"{key!r}: {problem}")
    return chat.render(tokenizer, prompt, settings.system) if use_chat else str(prompt)


def _with_answer(row: Mapping[str, Any], key: str | None) -> Mapping[str, Any]:
    if key is None:
        return row
    value: Any = row
    for name in [key] if key in row else key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise _Unusable(
                f"no {key!r} (data.answer_key); the row has {', '.join(map(repr, row))}"
            )
        value = value[name]
    return {**row, "answer": value}


def _tokens(
    texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase", special: bool
) -> Iterator[NDArray[np.int32]]:
    """Tokenize in batches, because the other outputs of a tokenizer take 100 bytes per token."""
    for start in range(0, len(texts), TOKENIZER_BATCH):
        batch = texts[start : start + TOKENIZER_BATCH]
        for tokens in tokenizer(batch, add_special_tokens=special)["input_ids"]:
            yield np.array(tokens, np.int32)


def _report(bad: Sequence[BadRow], good: int, origin: str, settings: DataSettings) -> None:
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


def _fingerprint(rows: Sequence[_Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(
            json.dumps([row.uid, row.text, row.row], sort_keys=True, default=str).encode()
        )
    return digest.hexdigest()
