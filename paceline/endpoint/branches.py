"""Completions of an episode as a tree, and the context of the next one.

A request continues a completion if its messages are those of that completion's request, the message
that the client got, and new ones. Its context is then the exact tokens of that completion and the
tokens of the new messages. Other requests begin a new row: their context is the whole text of the
chat template, or, where a completion is continued a second time, the tokens up to there.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.endpoint.request import ChatMessage, ChatRequest
from paceline.environment.protocol import Message
from paceline.environment.token_stream import ChatTemplate, Tokens
from paceline.types import Completion, Turn


@dataclass(frozen=True, slots=True)
class Start:
    """Where a completion begins."""

    context: Tokens
    new: Tokens  # the tokens since the completion that it continues
    history: tuple[Message, ...]  # as the chat template gets it, without the completion
    key: bytes  # of the request's messages
    parent: "Branch | None"  # the completion that it continues


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A completion and where it began."""

    start: Start
    completion: Completion
    text: str  # of all its tokens
    key: bytes  # of the messages up to the one that the client got


class Branches:
    """The completions of one episode, in the order in which they ended."""

    def __init__(self) -> None:
        self._made: list[Branch] = []

    def find(self, request: ChatRequest, template: ChatTemplate) -> Start:
        """Return where the completion of a request begins."""
        keys = _keys(request)
        messages = [message.for_template() for message in request.messages]
        for number in range(len(messages) - 1, 0, -1):
            if parent := self._made_with(keys[number]):
                return _continuation(parent, messages[number:], keys[-1], template)
        context = template.start(messages)
        return Start(context, context, tuple(messages), keys[-1], None)

    def add(self, start: Start, completion: Completion, text: str, said: ChatMessage) -> Branch:
        """Record a completion; `said` is the message that the client gets."""
        branch = Branch(start, completion, text, _next_key(start.key, said))
        self._made.append(branch)
        return branch

    def remove(self, branch: Branch) -> None:
        """Forget a completion that the client did not get."""
        self._made.remove(branch)

    @property
    def text(self) -> str:
        """The text of the last completion."""
        return self._made[-1].text if self._made else ""

    def turns(self) -> tuple[Turn, ...]:
        """Return the completions as turns, row by row. The last row has the last completion."""
        following: dict[Branch, Branch] = {}
        for branch in self._made:
            if parent := branch.start.parent:
                following.setdefault(parent, branch)
        continued = set(following.values())
        rows = [_row(branch, following) for branch in self._made if branch not in continued]
        rows.sort(key=lambda row: self._made.index(row[-1]))
        turns: list[Turn] = []
        for row in rows:
            first = row[0]
            turns.append(Turn(first.start.context, first.completion, restarts=bool(turns)))
            turns += [Turn(branch.start.new, branch.completion) for branch in row[1:]]
        return tuple(turns)

    def _made_with(self, key: bytes) -> Branch | None:
        """Return the completion of these messages; of equal ones, one that nothing continues."""
        found = [branch for branch in self._made if branch.key == key]
        parents = {branch.start.parent for branch in self._made}
        return next((each for each in found if each not in parents), found[-1] if found else None)


def _continuation(
    parent: Branch, reply: Sequence[Message], key: bytes, template: ChatTemplate
) -> Start:
    said = {"role": "assistant", "content": parent.text}
    sampled = tuple(parent.completion.tokens.tolist())
    history = (*parent.start.history, said, *reply)
    new = template.between(parent.start.history, said, sampled, reply)
    if new is None:  # the template writes earlier messages in another way
        context = template.start(history)
        return Start(context, context, history, key, None)
    return Start(parent.start.context + sampled + new, new, history, key, parent)


def _row(branch: Branch, following: dict[Branch, Branch]) -> list[Branch]:
    row = [branch]
    while following.get(row[-1]):
        row.append(following[row[-1]])
    return row


def _keys(request: ChatRequest) -> list[bytes]:
    """Return a key for the messages before each message, and one for all of them."""
    keys = [hashlib.blake2b(_json(request.tool_schemas), digest_size=16).digest()]
    for message in request.messages:
        keys.append(_next_key(keys[-1], message))
    return keys


def _next_key(key: bytes, message: ChatMessage) -> bytes:
    fields = message.for_template()
    for call in fields.get("tool_calls", ()):
        del call["id"]  # some programs do not return it
    return hashlib.blake2b(key + _json(fields), digest_size=16).digest()


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
