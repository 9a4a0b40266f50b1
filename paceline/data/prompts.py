"""The stream of prompts: any position of it, at any time.

`source[seq]` is a pure function of (settings, seed, seq), so the cursor of a run is one integer and resuming is exact.
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

if TYPE_CHECKING:  # importing transformers takes seconds, and settings are read for --help too
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

LIKELY = (
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
TOGETHER = 1024  # texts tokenized at a time
SHOWN = 5  # bad rows spelled out in a message; the rest are counted


class DataSettings(Settings):
    task: str | None = None
    """A built-in task, "name" or "name:difficulty", for example "sort:5". Give this or path."""
    path: str | tuple[str, ...] | None = None
    """Files of prompts (JSONL, JSON, CSV, parquet, a folder that `datasets` saved): a path, a glob pattern, or a list of them."""
    prompt_key: str = "prompt"
    """The column that holds the prompt: text, or a list of chat messages. The rest of the row goes to the reward."""
    answer_key: str | None = None
    """The column that a reward finds as row["answer"]; "a.b" is b inside a. Unset: the row's own "answer", if it has one."""
    max_prompt_length: int = Field(default=512, ge=1)
    """Tokens; a longer prompt is a bad row."""
    shuffle: bool = True
    """A new order in every epoch, each row once per epoch."""
    curriculum: str | None = None
    """Choose rows by what the model can do: "adaptive", or a class of your own as "file.py:Class". Unset: every row once per epoch."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first rows; for a task, the number of rows in an epoch."""
    chat: bool | None = None
    """Put prompts through the tokenizer's chat template. Unset: yes if it has one; text then becomes one user message."""
    system: str | None = None
    """A system message for prompts without one; needs the chat template."""
    on_bad_row: Literal["fail", "skip"] = "fail"

    @field_validator("task")
    @classmethod
    def _known_task(cls, spec: str | None) -> str | None:
        return spec if spec is None else get_task(spec).spec

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.task is not None and self.path is not None:
            raise ValueError(
                f"task = {self.task!r} and path = {self.path!r} are both set; prompts come from one of them"
            )
        return self


@dataclass(frozen=True, slots=True)
class BadRow:
    where: str  # file and row number
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


class PromptSource:
    """All prompts of a run. Position seq wraps over epochs; every epoch has each row once, in its own order when shuffling."""

    bad_rows: tuple[BadRow, ...]
    """Rows left out because on_bad_row = "skip"."""
    fingerprint: str
    """Changes when any prompt or row does; a run is only resumed on the same data."""

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
        self._order = lru_cache(maxsize=4)(
            self._make_order
        )  # the epochs in flight; an async run straddles two

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, seq: int) -> Prompt:
        if seq < 0:
            raise IndexError(f"prompt {seq}: positions start at 0")
        row = self._rows[self._row_at(seq)]
        return Prompt(row.uid, tuple(row.tokens.tolist()), row.text, row.row)

    def rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Every row with where it stands."""
        return ((row.where, row.row) for row in self._rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(row.tokens) for row in self._rows)

    @property
    def highest_token(self) -> int:
        return max(int(row.tokens.max()) for row in self._rows)

    def observe(self, groups: Sequence[Group]) -> None:
        """These were trained on; a curriculum learns from how they went."""
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
                    f"data.curriculum = {self._settings.curriculum!r} picked row {row!r} of {len(self._rows)}"
                )
            return row
        epoch, place = divmod(seq, len(self._rows))
        return int(self._order(epoch)[place]) if self._settings.shuffle else place

    def _make_order(self, epoch: int) -> NDArray[np.intp]:
        # Raw PCG64 words are the same in every numpy; `Generator.permutation` does not promise that.
        keys = np.random.PCG64([self._seed, epoch]).random_raw(len(self._rows))
        return np.argsort(keys, kind="stable")


class _Unusable(Exception):
    """Why a row cannot become a prompt."""


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
            problems[i] = f"the chat template fails on it: {type(e).__name__}: {e}"
    rows: dict[str, _Row] = {}
    for (i, text), tokens in zip(
        texts.items(), _tokens(list(texts.values()), tokenizer, not use_chat), strict=True
    ):
        read = reads[i]
        name = read.row.get("id")
        uid = read.where if name is None else str(name)
        if uid in rows:  # the id of a passage with several questions, say
            uid = f"{uid} ({read.where})"
        if not 0 < len(tokens) <= settings.max_prompt_length:
            problems[i] = (
                f"the prompt has {len(tokens)} tokens; data.max_prompt_length = {settings.max_prompt_length}"
            )
        else:
            rows[uid] = _Row(uid, read.where, text, tokens, given[i])
    bad = tuple(BadRow(reads[i].where, problems[i]) for i in sorted(problems))
    _judge(bad, len(rows), origin, settings)
    return list(rows.values()), bad


def _read(settings: DataSettings, seed: int) -> tuple[str, Sequence[ParsedRow]]:
    """Where the rows come from, and all of them."""
    if settings.task is not None:
        task = get_task(settings.task)
        return task.spec, [
            ParsedRow(f"{task.spec}:{i}", task.row(i, seed))
            for i in range(settings.limit or task.size)
        ]
    if settings.path is None:
        raise ConfigError(
            "there are no prompts: set data.task (for example 'sort:5') or data.path (for example 'prompts.jsonl')"
        )
    patterns = (settings.path,) if isinstance(settings.path, str) else settings.path
    files = find_files(patterns)
    origin = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
    reads = list(islice(read_files(files), settings.limit))
    columns = dict.fromkeys(name for read in reads for name in read.row)
    if columns and settings.prompt_key not in columns:
        likely = next((name for name in LIKELY if name in columns), "NAME")
        raise DataError(
            f"no column {settings.prompt_key!r} in {origin}; columns found: {', '.join(columns)}. "
            f"Say which one holds the prompt: data.prompt_key={likely}"
        )
    return origin, reads


def _use_chat(settings: DataSettings, tokenizer: "PreTrainedTokenizerBase") -> bool:
    use_chat = chat.has_template(tokenizer) if settings.chat is None else settings.chat
    if use_chat and not chat.has_template(tokenizer):
        raise ConfigError(
            "data.chat = true, but the model's tokenizer has no chat template; unset data.chat or use a chat model"
        )
    if settings.system is not None and not use_chat:
        raise ConfigError(
            "data.system is set, but prompts do not go through a chat template; unset data.system or use a chat model"
        )
    return use_chat


def _text(
    read: ParsedRow, settings: DataSettings, tokenizer: "PreTrainedTokenizerBase", use_chat: bool
) -> str:
    """The prompt of a row as the model sees it."""
    key = settings.prompt_key
    if read.problem:
        raise _Unusable(read.problem)
    if key not in read.row:
        raise _Unusable(
            f"no {key!r} (data.prompt_key); the row has {', '.join(map(repr, read.row)) or 'nothing'}"
        )
    prompt = read.row[key]
    if not isinstance(prompt, str | list):
        raise _Unusable(
            f"{key!r} is {type(prompt).__name__}; expected text or a list of chat messages"
        )
    if isinstance(prompt, list) and not use_chat:
        raise _Unusable(
            f"{key!r} is a list of chat messages, but data.chat is false or the tokenizer has no chat template"
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
    """A part at a time: what a tokenizer says beside the tokens takes a hundred bytes per token."""
    for start in range(0, len(texts), TOGETHER):
        for tokens in tokenizer(texts[start : start + TOGETHER], add_special_tokens=special)[
            "input_ids"
        ]:
            yield np.array(tokens, np.int32)


def _judge(bad: Sequence[BadRow], good: int, origin: str, settings: DataSettings) -> None:
    """Stop on bad rows, or on no rows at all; otherwise say how many were left out."""
    shown = "".join(f"\n  {row}" for row in bad[:SHOWN]) + (
        f"\n  ... and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    )
    if bad and settings.on_bad_row == "fail":
        advice = "Mend them, or leave them out with data.on_bad_row = 'skip'."
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
