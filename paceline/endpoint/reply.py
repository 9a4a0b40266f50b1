"""Replies of the chat completions API: one object, or a stream of chunks."""

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from paceline.endpoint.branches import Start
from paceline.endpoint.request import ChatRequest
from paceline.endpoint.session import Chat, Choice


class Reply:
    def __init__(
        self, request: ChatRequest, start: Start, choices: list[Choice], chat: Chat
    ) -> None:
        self._request, self._choices, self._chat = request, choices, chat
        self._prompt_tokens = len(start.context)
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": request.model,
        }

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"refusal": None, **choice.message.model_dump(exclude_none=True)}
                | {"content": choice.message.content},
                "finish_reason": choice.finish_reason,
                "logprobs": self._logprobs(choice),
            }
            for index, choice in enumerate(self._choices)
        ]
        kind = {"object": "chat.completion"}
        return self._head | kind | {"choices": choices, "usage": self._usage()}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a stream. Engines return whole completions, so it has few."""
        for index, choice in enumerate(self._choices):
            first: dict[str, Any] = {"role": "assistant", "content": choice.message.content}
            yield self._chunk(index, first, logprobs=self._logprobs(choice))
            for number, call in enumerate(choice.message.tool_calls or ()):
                named = {"name": call.function.name, "arguments": ""}
                head = {"index": number, "id": call.id, "type": call.type, "function": named}
                yield self._chunk(index, {"tool_calls": [head]})
                rest = {"index": number, "function": {"arguments": call.function.arguments}}
                yield self._chunk(index, {"tool_calls": [rest]})
            yield self._chunk(index, {}, choice.finish_reason)
        options = self._request.stream_options
        if options and options.include_usage:
            kind = {"object": "chat.completion.chunk"}
            yield self._head | kind | {"choices": [], "usage": self._usage()}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason}
        choice["logprobs"] = logprobs
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]}

    def _usage(self) -> dict[str, int]:
        made = sum(len(choice.completion) for choice in self._choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self._prompt_tokens + made,
        }

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Return the log-prob of every sampled token, the one that ended the turn included."""
        if not self._request.logprobs:
            return None
        sampled = zip(choice.completion.tokens, choice.completion.logprobs, strict=True)
        return {"content": [self._token(int(token), float(value)) for token, value in sampled]}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._chat.token_text(token)
        whole = "\ufffd" not in text  # else the token is a part of a character
        return {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode()) if whole else None,
            "top_logprobs": [],
        }


def event(data: dict[str, Any] | str) -> bytes:
    """Return a server-sent event. JSON is ASCII: a name may contain a lone surrogate."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}\n\n".encode()
