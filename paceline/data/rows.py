"""Rows as prompts: rendered with the chat template, tokenized, and checked one by one."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from paceline.data import chat
from paceline.data.files import ParsedRow
from paceline.errors import ConfigError, DataError
from paceline.types import Prompt

if TYPE_CHECKING:  # importing transformers takes seconds, and --help needs only the settings
    from transformers import PreTrainedTokenizerBase

    from paceline.data.prompts import DataSettings, RowSettings

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


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot become a prompt, and why."""

    where: str  # file and row number
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    uid: str
    where: str
    text: str
    tokens: NDArray[np.int32]
    row: Mapping[str, Any]
    mask: NDArray[np.bool_] | None = None  # trained tokens of an example; a prompt has none

    def prompt(self) -> Prompt:
        return Prompt(self.uid, tuple(self.tokens.tolist()), self.text, self.row)


class Unusable(Exception):
    """The reason why a row cannot be used."""


class RowReader(Protocol):
    """Turns rows of a dataset into tokens."""

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a row."""
        ...

    def check_columns(self, rows: Iterable[Mapping[str, Any]], origin: str) -> None:
        """Raise DataError if no row has the columns that are read."""
        ...

    def tokenize(self, reads: Sequence[ParsedRow]) -> Iterator[TokenizedRow | BadRow]:
        """Yield the tokens of each row, or the reason why it cannot be used, in order."""
        ...


class RowTokenizer:
    """Turns rows into prompts."""

    def __init__(self, settings: "DataSettings", tokenizer: "PreTrainedTokenizerBase") -> None:
        self._settings, self._tokenizer = settings, tokenizer
        self._use_chat = use_chat(settings, tokenizer)

    @property
    def max_length(self) -> int:
        return self._settings.max_prompt_length

    def check_columns(self, rows: Iterable[Mapping[str, Any]], origin: str) -> None:
        check_columns(rows, origin, self._settings.prompt_key)

    def tokenize(self, reads: Sequence[ParsedRow]) -> Iterator[TokenizedRow | BadRow]:
        """Yield each row as a prompt, or the reason why it cannot be one, in order."""
        problems: dict[int, str] = {}
        rendered: dict[int, tuple[str, Mapping[str, Any]]] = {}
        for i, read in enumerate(reads):
            try:
                text = self._text(read)
                rendered[i] = text, _with_answer(read.row, self._settings.answer_key)
            except Unusable as e:
                problems[i] = str(e)
            except TemplateError as e:
                problems[i] = f"the chat template failed: {e}"
            except (TypeError, ValueError, LookupError, AttributeError) as e:
                problems[i] = f"the chat template failed: {type(e).__name__}: {e}"
        texts = [text for text, _ in rendered.values()]
        tokens = tokenize_texts(self._tokenizer, texts, special=not self._use_chat)
        longest = self._settings.max_prompt_length
        for i, read in enumerate(reads):
            if i in problems:
                yield BadRow(read.where, problems[i])
                continue
            text, row = rendered[i]
            found = next(tokens)
            if not len(found):
                left_out = "; the chat template left out its text" if self._use_chat else ""
                yield BadRow(read.where, f"the prompt has no tokens{left_out}")
            elif len(found) > longest:
                yield BadRow(
                    read.where,
                    f"the prompt has {len(found)} tokens; data.max_prompt_length = {longest}",
                )
            else:
                name = row.get("id")
                uid = read.where if name is None else str(name)
                yield TokenizedRow(uid, read.where, text, found, row)

    def _text(self, read: ParsedRow) -> str:
        """Return the prompt of a row as the text the model reads."""
        key = self._settings.prompt_key
        if read.problem:
            raise Unusable(read.problem)
        if key not in read.row:
            raise Unusable(
                f"no {key!r} (data.prompt_key); "
                f"the row has {', '.join(map(repr, read.row)) or 'no columns'}"
            )
        prompt = read.row[key]
        if not isinstance(prompt, str | list):
            raise Unusable(
                f"{key!r} is {type(prompt).__name__}; expected text or a list of chat messages"
            )
        if isinstance(prompt, list) and not self._use_chat:
            raise Unusable(
                f"{key!r} is a list of chat messages, "
                "but data.chat is false or the tokenizer has no chat template"
            )
        problem = chat.message_problem(
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )
        if problem:
            raise Unusable(f"{key!r}: {problem}")
        if not self._use_chat:
            return str(prompt)
        return chat.render(self._tokenizer, prompt, self._settings.system)


def tokenize_texts(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], special: bool
) -> Iterator[NDArray[np.int32]]:
    """Tokenize in batches, because a tokenizer's other outputs take 100 bytes per token.

    `special`: with the special tokens that the tokenizer puts first. Those that it puts last are
    left out, because they end the text that a completion is to continue.
    """
    appended = _appended(tokenizer) if special else 0
    for start in range(0, len(texts), TOKENIZER_BATCH):
        batch = texts[start : start + TOKENIZER_BATCH]
        for tokens in tokenizer(batch, add_special_tokens=special)["input_ids"]:
            yield np.array(tokens[: len(tokens) - appended], np.int32)


def tokenize_continuation(tokenizer: "PreTrainedTokenizerBase", text: str) -> NDArray[np.int32]:
    """Tokenize a text that follows another one.

    Tokenizers such as that of Llama 2 put a space in front of a text, but not in the middle of one.
    """
    for before in ("\n", "a"):
        first, both = tokenize_texts(tokenizer, [before, before + text], special=False)
        if np.array_equal(both[: len(first)], first):
            return both[len(first) :]
    return next(tokenize_texts(tokenizer, [text], special=False))


def _appended(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the number of special tokens that the tokenizer puts after a text."""
    whole, plain = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False)
    )
    added = len(whole) - len(plain)
    counts = (n for n in range(added + 1) if whole[added - n : len(whole) - n] == plain)
    return next(counts, 0)


def check_columns(
    rows: Iterable[Mapping[str, Any]], origin: str, prompt_key: str, section: str = "data"
) -> None:
    """Raise DataError if no row has the prompt's column. `section`: of the settings of the rows."""
    columns = dict.fromkeys(name for row in rows for name in row)
    if columns and prompt_key not in columns:
        likely = likely_column(prompt_key, columns, LIKELY_PROMPT_KEYS)
        raise DataError(
            f"no column {prompt_key!r} in {origin}; columns found: {', '.join(map(str, columns))}. "
            f"Select the prompt column, for example {section}.prompt_key={likely}"
        )


def likely_column(key: str, columns: Iterable[Any], usual: Iterable[str]) -> str:
    """Return the column that a user meant with `key`: a similar name, or the first usual one."""
    names = [*map(str, columns)]
    close = difflib.get_close_matches(key, names, n=1)
    return next((name for name in (*close, *usual) if name in names), "NAME")


def use_chat(settings: "RowSettings", tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether rows are rendered with the chat template."""
    chosen = chat.has_template(tokenizer) if settings.chat is None else settings.chat
    if chosen and not chat.has_template(tokenizer):
        raise ConfigError(
            "data.chat = true, but the model's tokenizer has no chat template; "
            "remove data.chat or use a chat model"
        )
    if settings.system is not None and not chosen:
        raise ConfigError(
            "data.system is set, but prompts are not rendered with a chat template; "
            "remove data.system or use a chat model"
        )
    return chosen


def _with_answer(row: Mapping[str, Any], key: str | None) -> Mapping[str, Any]:
    if key is None:
        return row
    value: Any = row
    for name in [key] if key in row else key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise Unusable(f"no {key!r} (data.answer_key); the row has {', '.join(map(repr, row))}")
        value = value[name]
    return {**row, "answer": value}
