"""Conversation that another program leads: it asks for the completion of a list of messages.

What the model sampled is kept as tokens. The list must continue the conversation so far.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.environment.conversation import Generate, Limits
from paceline.environment.protocol import Message
from paceline.environment.token_stream import ChatTemplate
from paceline.environment.tool_calls import parse_tool_calls
from paceline.errors import RolloutError
from paceline.types import Completion, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Chat:
    """The turns of one conversation."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", limits: Limits, generate: Generate
    ) -> None:
        self._tokenizer, self._max_length, self._generate = tokenizer, limits.max_length, generate
        self.turns: list[Turn] = []
        self.text = ""
        self._history: list[Message] = []  # messages before the last completion, as rendered
        self._given: list[Message] = []  # the same ones, as the program writes them
        self._context: tuple[int, ...] = ()

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> Completion | None:
        """Return the completion of a conversation; None if there is no room for one."""
        template = ChatTemplate(self._tokenizer, tools)
        restarts = False
        if not self.turns:
            new = template.start(messages)
            self._history, context = list(messages), new
        else:
            said = {"role": "assistant", "content": self.text}
            old, reply = messages[: len(self._given) + 1], messages[len(self._given) + 1 :]
            if list(old[:-1]) != self._given or old[-1].get("content") != self.text or not reply:
                raise RolloutError(
                    "the environment does not continue its conversation, but changes earlier "
                    "messages; expected the same messages, the completion, and new ones"
                )
            sampled = tuple(self.turns[-1].completion.tokens.tolist())
            between = template.between(self._history, said, sampled, reply)
            self._history += [said, *reply]
            restarts = between is None  # the template writes earlier messages in another way
            new = template.start(self._history) if between is None else between
            context = new if restarts else self._context + sampled + new
        if len(context) >= self._max_length:
            return None
        completion = await self._generate(context)
        self.text = template.text(tuple(completion.tokens.tolist()))
        self.turns.append(Turn(new, completion, restarts=restarts))
        self._context, self._given = context, list(messages)
        return completion

    def calls(self, tools: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
        """Return the tool calls of the last completion that can be read: name and JSON."""
        found = parse_tool_calls(self.text, self._tokenizer, tools) if tools else []
        return [(call.name, json.dumps(call.arguments)) for call in found if not call.problem]
