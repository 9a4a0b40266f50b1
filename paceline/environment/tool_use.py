"""Environment in which the model calls tools until it writes a message without a call."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from paceline.environment.protocol import Message, Reply
from paceline.environment.tool_calls import ToolCall, parse_tool_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CALLS = 16  # of one message; the model can write more than a machine should run


class Tools(Protocol):
    """What runs the tools: the controller's toolbox, or environment workers."""

    async def call(self, name: str, arguments: Mapping[str, Any] | str) -> str: ...


class ToolUse:
    def __init__(self, tools: Tools, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tools, self._tokenizer = tools, tokenizer

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        return None

    async def step(self, message: Message) -> Reply:
        calls = parse_tool_calls(message["content"], self._tokenizer)
        if not calls:
            return Reply(done=True)
        results = await asyncio.gather(*map(self._run, calls[:MAX_CALLS]))
        if len(calls) > MAX_CALLS:
            results.append(f"error: {len(calls)} calls; at most {MAX_CALLS} in one message")
        names = [call.name for call in calls[:MAX_CALLS]] + [""]
        return Reply(
            [
                {"role": "tool", "name": name, "content": result or "(no output)"}
                for name, result in zip(names, results, strict=False)
            ]
        )

    async def close(self) -> None:
        return

    async def _run(self, call: ToolCall) -> str:
        if call.problem:
            return f"error: {call.problem}"
        return await self._tools.call(call.name, call.arguments)
