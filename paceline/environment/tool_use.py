"""Environment in which the model calls tools until it writes a message without a call.

That message ends the episode, or goes to another environment, whose tools these are.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from paceline.environment.protocol import Environment, Message, Reply
from paceline.environment.tool_calls import ToolCall, parse_tool_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CALLS = 16  # of one message; the model can write more than a machine should run


class Tools(Protocol):
    """What runs the tools: the controller's toolbox, or environment workers."""

    async def call(self, name: str, arguments: Mapping[str, Any] | str) -> str: ...


class ToolUse:
    def __init__(
        self,
        tools: Tools,
        schemas: Sequence[dict[str, Any]],
        tokenizer: "PreTrainedTokenizerBase",
        environment: Environment | None = None,
    ) -> None:
        self._tools, self._schemas = tools, schemas
        self._tokenizer, self._environment = tokenizer, environment

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        return await self._environment.reset(row) if self._environment else None

    async def step(self, message: Message) -> Reply:
        calls = parse_tool_calls(message["content"], self._tokenizer, self._schemas)
        if not calls:
            return await self._environment.step(message) if self._environment else Reply(done=True)
        results = await asyncio.gather(*map(self._run, calls[:MAX_CALLS]))
        if len(calls) > MAX_CALLS:
            results.append(f"error: {len(calls)} calls; at most {MAX_CALLS} in one message")
        names = [call.name for call in calls[:MAX_CALLS]] + [""]
        return Reply(
            [
                {"role": "tool", "name": _text(name), "content": _text(result)}
                for name, result in zip(names, results, strict=False)
            ]
        )

    async def close(self) -> None:
        if close := getattr(self._environment, "close", None):
            await close()

    async def _run(self, call: ToolCall) -> str:
        if call.problem:
            return f"error: {call.problem}"
        result = await self._tools.call(call.name, call.arguments)
        return result if result.strip() else "(no output)"  # a blank message is invalid


def _text(text: str) -> str:
    """Replace lone surrogates, which JSON can contain and a tokenizer cannot encode."""
    return text.encode("utf-8", "replace").decode()
