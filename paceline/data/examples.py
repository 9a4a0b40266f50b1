"""Rows as supervised examples: a prompt with its completion, or a conversation, in tokens.

The prompt has the tokens that it has in `paceline train`, and only completions are trained: of a
conversation, what the assistant says. A completion ends with the token that ends a generation.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from pydantic import Field

from paceline.data import chat
from paceline.data.files import ParsedRow
from paceline.data.prompts import RowSettings
from paceline.data.rows import (
    LIKELY_PROMPT_KEYS,
    BadRow,
    TokenizedRow,
    Unusable,
    likely_column,
    tokenize_continuation,
    tokenize_texts,
    use_chat,
)
from paceline.errors import ConfigError, DataError

if TYPE_CHECKING:  # importing transformers takes seconds, and --help needs only the settings
    from transformers import PreTrainedTokenizerBase

LIKELY_COMPLETION_KEYS = ("completion", "response", "answer", "output", "solution", "target")
Pieces = list[tuple[str, bool]]  # consecutive texts of a row, and whether each is trained


class ExampleSettings(RowSettings):
    completion_key: str = "completion"
    """Column with the completion: text, or a list of chat messages. Of a built-in task, the
    completion is its answer."""
    messages_key: str = "messages"
    """Column with a conversation, for rows without prompt and completion."""
    turns: Literal["all", "last"] = "all"
    """Messages of the assistant that are trained in a conversation: all of them, or the last."""
    max_length: int = Field(default=2048, ge=2)
    """Maximum number of tokens of a row, with its completion. A longer row is a bad row."""

    @property
    def completion_column(self) -> str:
        return self.completion_key if self.task is None else "answer"


class ExampleTokenizer:
    """Turns rows into tokens with a mask of those that are trained."""

    def __init__(self, settings: ExampleSettings, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._settings, self._tokenizer = settings, tokenizer
        self._use_chat = use_chat(settings, tokenizer)
        self._stops = chat.stop_token_ids(tokenizer)
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                "the tokenizer of the model has no end-of-sequence token, so a completion cannot "
                "learn to end; set eos_token in tokenizer_config.json"
            )
        self._eos = int(tokenizer.eos_token_id)

    @property
    def max_length(self) -> int:
        return self._settings.max_length

    def check_columns(self, rows: Iterable[Mapping[str, Any]], origin: str) -> None:
        check_example_columns(rows, origin, self._settings)

    def tokenize(self, reads: Sequence[ParsedRow]) -> Iterator[TokenizedRow | BadRow]:
        problems: dict[int, str] = {}
        found: dict[int, Pieces] = {}
        for i, read in enumerate(reads):
            try:
                found[i] = self._pieces(read)
            except Unusable as e:
                problems[i] = str(e)
            except TemplateError as e:
                problems[i] = f"the chat template failed: {e}"
            except (TypeError, ValueError, LookupError, AttributeError) as e:
                problems[i] = f"the chat template failed: {type(e).__name__}: {e}"
        prefixes = [
            text for pieces in found.values() for text in accumulate(text for text, _ in pieces)
        ]
        tokenized = tokenize_texts(self._tokenizer, prefixes, special=not self._use_chat)
        longest = self._settings.max_length
        for i, read in enumerate(reads):
            if i in problems:
                yield BadRow(read.where, problems[i])
                continue
            tokens, mask = self._encode(found[i], tokenized)
            if len(tokens) > longest:
                problem = f"the row has {len(tokens)} tokens; data.max_length = {longest}"
                yield BadRow(read.where, problem)
            else:
                name = read.row.get("id")
                text = "".join(text for text, _ in found[i])
                uid = read.where if name is None else str(name)
                yield TokenizedRow(uid, read.where, text, tokens, read.row, mask)

    # -- text

    def _pieces(self, read: ParsedRow) -> Pieces:
        s = self._settings
        if read.problem:
            raise Unusable(read.problem)
        # Tabular files have every column in every row.
        row = {name: value for name, value in read.row.items() if value is not None}
        if s.prompt_key in row and s.completion_column in row:
            prompt, completion = row[s.prompt_key], row[s.completion_column]
            _check(s.prompt_key, prompt, "user", complete=False)
            _check(s.completion_column, completion, "assistant", complete=True)
            if self._use_chat:
                before = chat.conversation(prompt, s.system)
                return self._rendered(before + _completion_messages(completion), len(before))
            if isinstance(prompt, str) and isinstance(completion, str):
                return [(prompt, False), (completion, True)]
        elif s.messages_key in row:
            _check(s.messages_key, row[s.messages_key], "user", complete=True)
            if self._use_chat:
                return self._rendered(chat.conversation(row[s.messages_key], s.system), 0)
        else:
            raise Unusable(
                f"expected {s.prompt_key!r} and {s.completion_column!r}, or {s.messages_key!r}; "
                f"the row has {', '.join(map(repr, row)) or 'no columns'}"
            )
        raise Unusable(
            "the row has chat messages, but data.chat is false or the tokenizer has no chat "
            "template; expected a prompt and a completion as text"
        )

    def _rendered(self, messages: list[dict[str, Any]], first: int) -> Pieces:
        """Return the conversation up to the last message of the assistant.

        Messages before number `first` are the prompt, so none of them is trained.
        """
        turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        if not turns:
            raise Unusable("no message has the role assistant, so nothing can be trained")
        pieces: Pieces = []
        text = ""
        for i in turns if self._settings.turns == "all" else turns[-1:]:
            for upto, trained in ((i, False), (i + 1, True)):
                longer = self._render(messages[:upto], not trained)
                if not longer.startswith(text):
                    raise Unusable(
                        f"the chat template changes the text before message {upto} when message "
                        f"{i + 1} is added"
                        + ("" if trained else "; set data.turns = 'last' to train the last message")
                    )
                pieces.append((longer[len(text) :], trained))
                text = longer
        return pieces

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        assert isinstance(text, str)
        return text

    # -- tokens

    def _encode(
        self, pieces: Pieces, tokenized: Iterator[NDArray[np.int32]]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return tokens and mask. `tokenized` yields the tokens up to the end of each piece.

        Tokens of a piece never change those before it: a prompt has its own tokens, as it has when
        a completion is generated.
        """
        tokens, mask = np.zeros(0, np.int32), np.zeros(0, np.bool_)
        for number, (text, trained) in enumerate(pieces, 1):
            joint = next(tokenized)
            if np.array_equal(joint[: len(tokens)], tokens):
                own = joint[len(tokens) :]
            else:
                own = tokenize_continuation(self._tokenizer, text)
            is_last = number == len(pieces)
            end = self._end(own) if trained else 0
            if is_last:
                own = own[:end] if end else np.append(own, np.int32(self._eos))
            tokens = np.concatenate([tokens, own])
            mask = np.concatenate([mask, trained & (np.arange(len(own)) < (end or len(own)))])
        mask[0] = False  # nothing predicts it
        return tokens, mask

    def _end(self, tokens: NDArray[np.int32]) -> int:
        """Return where a completion ends: after its stop token; 0 if it has none at the end.

        Some templates write a line break after the stop token.
        """
        stops = np.flatnonzero(np.isin(tokens, self._stops))
        end = int(stops[-1]) + 1 if len(stops) else 0
        rest = self._tokenizer.decode(tokens[end:].tolist()) if end else ""
        return 0 if str(rest).strip() else end


def check_example_columns(
    rows: Iterable[Mapping[str, Any]], origin: str, settings: ExampleSettings
) -> None:
    """Raise DataError if no row can have a prompt with a completion, or a conversation."""
    columns = dict.fromkeys(name for row in rows for name in row)
    prompt, completion = settings.prompt_key, settings.completion_column
    if not columns or settings.messages_key in columns or {prompt, completion} <= columns.keys():
        return
    likely = [
        likely_column(prompt, columns, LIKELY_PROMPT_KEYS),
        likely_column(completion, columns, LIKELY_COMPLETION_KEYS),
    ]
    raise DataError(
        f"no columns {prompt!r} and {completion!r}, and no column {settings.messages_key!r} in "
        f"{origin}; columns found: {', '.join(map(str, columns))}. Select them, for example "
        f"data.prompt_key={likely[0]} data.completion_key={likely[1]}"
    )


def _check(key: str, value: Any, role: str, complete: bool) -> None:
    if not isinstance(value, str | list):
        raise Unusable(
            f"{key!r} is {type(value).__name__}; expected text or a list of chat messages"
        )
    messages = [{"role": role, "content": value}] if isinstance(value, str) else value
    if problem := chat.message_problem(messages, complete):
        raise Unusable(f"{key!r}: {problem}".replace("the prompt is", "the text is"))


def _completion_messages(completion: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return chat.conversation(completion)
