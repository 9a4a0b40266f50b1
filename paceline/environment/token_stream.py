"""Tokens of a conversation, turn by turn. What the model sampled is never tokenized again.

After a completion, the stream gets only the tokens between it and the next one: the end of the turn
if it was not sampled, the new messages, and the header of the next turn. They come from the chat
template: its text of the whole conversation without its text up to the completion.

A template may write earlier messages in another way once there are later ones; many remove the
reasoning of earlier turns. The next completion then has a new context, the text of the whole
conversation, and its turn restarts.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from paceline.data.chat import conversation, stop_token_ids, text_decoder
from paceline.environment.protocol import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = tuple[int, ...]
MARK = "\u2042"  # stands for the text of a completion; templates do not contain it


class ChatTemplate:
    """Chat template of a tokenizer, with the tools that the model may call."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> None:
        """`max_tokens`: the end of a text may be left out if what is before it is as long."""
        self._tokenizer, self._tools = tokenizer, list(tools) or None
        self._max_tokens = max_tokens
        # Some formats mark tool calls with special tokens, which the parser of calls must see.
        self._decode = text_decoder(tokenizer, keep_special=bool(tools))
        self._ends = frozenset(stop_token_ids(tokenizer))
        # The generation config of a model may have further tokens that end a completion.
        self._special = self._ends | frozenset(tokenizer.all_special_ids)
        self._turn_end = self._end_of_turn()

    def start(self, messages: Sequence[Message]) -> Tokens:
        """Return the tokens of a conversation up to where the next completion begins."""
        return self._encode(self._render(messages, True))

    def between(
        self, history: Sequence[Message], said: Message, sampled: Tokens, reply: Sequence[Message]
    ) -> Tokens | None:
        """Return the tokens between a completion and the next one.

        `said` is the message of the completion, and `sampled` are its tokens. None if the template
        writes earlier messages in another way, so that the next context does not continue this one.
        """
        before = self._render([*history, said], False)
        after = self._render([*history, said, *reply], True)
        if not after.startswith(before) or not before.startswith(self._render(history, True)):
            return None
        end = self._turn_end if before.endswith(self._turn_end) else ""
        tokens = self._encode(end + after[len(before) :])
        if sampled and sampled[-1] in self._ends and tokens and tokens[0] in self._ends:
            return tokens[1:]  # the model has ended its turn itself
        return tokens

    def text(self, sampled: Tokens) -> str:
        """Return the text of a completion, without the token that ended it."""
        ended = bool(sampled) and sampled[-1] in self._special
        return self._decode(list(sampled[:-1] if ended else sampled))

    def _end_of_turn(self) -> str:
        """Return what the template writes after the text of a completion."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        return self._render(messages, False).rpartition(MARK)[2]

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            conversation(messages),
            tools=self._tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> Tokens:
        if self._max_tokens is not None:
            # Megabytes, for example of a web page, take seconds in the event loop of the run.
            enough = self._max_tokens * self._longest_token
            if (
                len(text) > enough
                and len(start := self._encoded(text[:enough])) >= self._max_tokens
            ):
                return start
        return self._encoded(text)

    def _encoded(self, text: str) -> Tokens:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token in the vocabulary."""
        return max(map(len, self._tokenizer.get_vocab()))
