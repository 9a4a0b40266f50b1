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

Places = dict[str, str]  # paths of fields of chat completions, and their paths in a request
# Fields of chat completions that have another name here.
NAMES: Places = {"messages": "input", "max_completion_tokens": "max_output_tokens"}


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
    messages, places = _messages(asked)
    fields = {
        "model": asked.model,
        "messages": messages,
        "tools": [_tool(tool) for tool in asked.tools] if asked.tools else None,
        "max_completion_tokens": asked.max_output_tokens,
    }
    for name in ("tool_choice", "parallel_tool_calls", "temperature", "top_p"):
        fields[name] = getattr(asked, name)
    try:
        return read_chat(fields)
    except RequestError as error:
        param = error.param or ""
        name = _place(param, places)
        message = str(error).removeprefix(param)
        raise RequestError(400, f"{name}{message}", name, error.code) from None


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


def _place(param: str, places: Places) -> str:
    """Return the path of a field in the request, from its path in a chat completion."""
    start, rest = param, ""
    while start not in places and "." in start:
        start, _, last = start.rpartition(".")
        rest = f".{last}{rest}"
    return places.get(start, start) + rest


def _messages(asked: ResponsesRequest) -> tuple[list[dict[str, Any]], Places]:
    """Return the messages of a request, and where their fields come from."""
    messages: list[dict[str, Any]] = []
    places = dict(NAMES)
    if asked.instructions is not None:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}], places
    for number, item in enumerate(asked.input):
        kind, here = item.get("type", "message"), f"input.{number}"
        places[f"messages.{len(messages)}"] = here
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _text(item.get("content"))})
        elif kind == "function_call":
            # The calls of a response follow its text; together they are one message.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            calls = messages[-1].setdefault("tool_calls", [])
            call = f"messages.{len(messages) - 1}.tool_calls.{len(calls)}"
            places |= {f"{call}.id": f"{here}.call_id", f"{call}.function": here}
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls.append({"id": item.get("call_id") or "", "function": function})
        elif kind == "function_call_output":
            message = f"messages.{len(messages)}"
            places |= {f"{message}.tool_call_id": f"{here}.call_id"}
            places |= {f"{message}.content": f"{here}.output"}
            result = {"tool_call_id": item.get("call_id"), "content": _text(item.get("output"))}
            messages.append({"role": "tool", **result})
        else:
            raise RequestError(
                400,
                f"{here}.type: {kind!r:.80}; expected message, function_call or "
                "function_call_output",
                f"{here}.type",
            )
    return messages, places


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
