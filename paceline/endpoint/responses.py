"""The Responses API in terms of chat completions: one response per request, without a state.

A client sends the whole input again. The items of a response become one assistant message, so a
request that returns them continues the conversation with exact tokens, as in chat completions.
"""

import secrets
import time
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from paceline.endpoint.branches import Start
from paceline.endpoint.request import (
    Bookkeeping,
    ChatRequest,
    RequestError,
    first_problem,
    read_chat,
    read_object,
)
from paceline.endpoint.session import Choice

# Fields of chat completions that have another name here.
NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens"}


class ResponsesRequest(Bookkeeping):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    temperature: Any = None
    top_p: Any = None
    max_output_tokens: Any = None
    stream: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None


def read_responses_request(body: bytes) -> ChatRequest:
    """Return a request of the Responses API as one for a chat completion. Raises RequestError."""
    try:
        asked = ResponsesRequest.model_validate(read_object(body))
    except ValidationError as failed:
        raise first_problem(failed) from None
    fields = {
        "model": asked.model,
        "messages": _messages(asked),
        "tools": [_tool(tool) for tool in asked.tools] if asked.tools else None,
        "max_completion_tokens": asked.max_output_tokens,
    }
    for name in ("tool_choice", "parallel_tool_calls", "temperature", "top_p"):
        fields[name] = getattr(asked, name)
    try:
        return read_chat(fields)
    except RequestError as error:
        first, dot, rest = (error.param or "").partition(".")
        name = NAMES.get(first, first)
        message = str(error).removeprefix(first)
        raise RequestError(400, f"{name}{message}", f"{name}{dot}{rest}", error.code) from None


def response(request: ChatRequest, start: Start, choice: Choice) -> dict[str, Any]:
    """Return the response with the completion of a request."""
    output: list[dict[str, Any]] = []
    if choice.message.content is not None:
        text = {"type": "output_text", "text": choice.message.content, "annotations": []}
        output.append(_item("message", "msg", role="assistant", content=[text]))
    for call in choice.message.tool_calls or ():
        function = call.function.model_dump()
        output.append(_item("function_call", "fc", call_id=call.id, **function))
    cut = choice.finish_reason == "length"
    made = len(choice.completion)
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "output": output,
        "tools": [{"type": "function", **tool["function"]} for tool in request.tool_schemas],
        "tool_choice": request.tool_choice or "auto",
        "parallel_tool_calls": True,
        "usage": {
            "input_tokens": len(start.context),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(start.context) + made,
        },
    }


def _item(kind: str, prefix: str, **fields: Any) -> dict[str, Any]:
    identity = f"{prefix}_{secrets.token_hex(12)}"
    return {"type": kind, "id": identity, "status": "completed", **fields}


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if asked.instructions is not None:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    for number, item in enumerate(asked.input):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _text(item.get("content"))})
        elif kind == "function_call":
            # The calls of a response follow its text; together they are one message.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id") or "", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = {"tool_call_id": item.get("call_id"), "content": _text(item.get("output"))}
            messages.append({"role": "tool", **result})
        else:
            raise RequestError(
                400,
                f"input.{number}.type: {kind!r:.80}; expected message, function_call or "
                "function_call_output",
                f"input.{number}.type",
            )
    return messages


def _text(content: Any) -> Any:
    """Return content in which the parts with text have the type of chat completions."""
    if not isinstance(content, list):
        return content
    text = ("input_text", "output_text")
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in text
        else part
        for part in content
    ]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool.items() if name not in ("type", "strict")}
    return {"type": tool.get("type"), "function": function}
