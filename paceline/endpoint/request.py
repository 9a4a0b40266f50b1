"""Requests of the chat completions API. A field that is not served is an error that names it."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.data.chat import message_problem

MAX_CHOICES = 64  # completions of one request
MAX_STOPS = 16


class RequestError(Exception):
    """A request that gets an error in OpenAI's format."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    name: str
    arguments: str


class RequestedCall(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """A message. Fields that the client returns from replies, such as `refusal`, are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[RequestedCall] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it: arguments of calls are objects."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _parsed(call.function.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        return message

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionTool(BaseModel):
    type: Literal["function"]
    function: dict[str, Any]

    @model_validator(mode="after")
    def _has_name(self) -> "FunctionTool":
        if not isinstance(self.function.get("name"), str):
            raise ValueError("the function has no name")
        return self


class StreamOptions(BaseModel):
    include_usage: bool = False
    include_obfuscation: bool = False


class TextFormat(BaseModel):
    type: Literal["text"]


class Bookkeeping(BaseModel):
    """Fields for OpenAI's servers, which have no effect here."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class ChatRequest(Bookkeeping):
    """The body of a request. A field that would be ignored must have a value without effect."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None  # engines return log-probs of sampled tokens only
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: int | None = None
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        return [tool.model_dump() for tool in self.tools or ()]

    @property
    def reads_calls(self) -> bool:
        """Whether tool calls are read from completions."""
        return bool(self.tools) and self.tool_choice != "none"


def read_request(body: bytes) -> ChatRequest:
    """Parse and check a request. Raises RequestError that names the field."""
    return read_chat(read_object(body))


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body, without fields that are null: they have no value.

    Raises RequestError.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(400, "the body is not a JSON object")
    return {name: value for name, value in fields.items() if value is not None}


def read_chat(fields: Mapping[str, Any]) -> ChatRequest:
    """Check the fields of a request. Raises RequestError."""
    try:
        request = ChatRequest.model_validate(fields)
    except ValidationError as failed:
        raise first_problem(failed) from None
    if problem := message_problem([message.for_template() for message in request.messages]):
        raise RequestError(400, f"messages: {problem}", "messages")
    if request.stream_options and not request.stream:
        raise RequestError(400, "stream_options: only for stream = true", "stream_options")
    return request


def first_problem(failed: ValidationError) -> RequestError:
    """Return the first error. A value of several types has one for each; the deepest fits best.

    Of equally deep ones, it is one of the type that the value has: a list is too long, for example.
    """
    errors = failed.errors(include_url=False)
    of_field = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    error = max(of_field, key=lambda error: (len(error["loc"]), "_type" not in error["type"]))
    path = [str(part) for part in error["loc"] if not _is_variant(part)]
    param = ".".join(path) or None
    if error["type"] == "extra_forbidden":
        return RequestError(400, f"{param}: this server has no such field", param)
    if error["type"] == "missing":
        return RequestError(400, f"{param}: the field is missing", param)
    return RequestError(400, f"{param}: {error['msg']}; got {error['input']!r:.80}", param)


def _is_variant(part: str | int) -> bool:
    """Return whether a part of an error's path is a type of a union and not a field."""
    return isinstance(part, str) and ("[" in part or part in ("str", "constrained-str"))


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
