"""Tool calls in the text of a completion.

A tokenizer that knows the format of its model (`response_template`) parses it. For others, this
module knows the three common formats: <tool_call>{…}</tool_call> (Qwen, Hermes, SmolLM),
[TOOL_CALLS] [{…}] (Mistral), and a completion that is a JSON object (Llama 3).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The spaces around a call are not part of the pattern: `\s*` beside `.*?` would take a time
# that is quadratic in a run of spaces, and the model may write any text.
TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
MISTRAL = "[TOOL_CALLS]"
LLAMA = "<|python_tag|>"
_BETWEEN = re.compile(r"[; \n]*")  # objects
MAX_PROBLEM = 300  # characters of a message about a call


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    problem: str = ""  # the call cannot be read


def parse_tool_calls(
    text: str, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[dict[str, Any]] = ()
) -> list[ToolCall]:
    """Return the calls of a completion in their order, including those that cannot be read.

    `text` includes special tokens, because some formats mark calls with them. `tools` are the
    schemas that the model has seen; a tokenizer's parser converts arguments to their types.
    """
    if getattr(tokenizer, "response_template", None):
        return _parsed(text, tokenizer, tools)
    if "<tool_call>" in text:
        return [_read(found.strip()) for found in TAGGED.findall(text)]
    if MISTRAL in text:
        return _read_list(text.partition(MISTRAL)[2])
    stripped = text.strip().removeprefix(LLAMA).strip()
    if stripped.startswith("{") and '"name"' in stripped:
        return _read_objects(stripped)
    return []


def _parsed(
    text: str, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[dict[str, Any]]
) -> list[ToolCall]:
    # The parser needs what the chat template writes before a completion, for example "<think>".
    before = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}],
        tools=list(tools) or None,
        tokenize=False,
        add_generation_prompt=True,
    )
    try:
        parsed: Any = tokenizer.parse_response(text, prefix=before, tools=list(tools) or None)
        found = parsed.get("tool_calls") or ()
        return [_call(each.get("function", each)) for each in found]
    except Exception as error:  # of the tokenizer's parser, which may raise anything
        return [ToolCall("", {}, f"the call cannot be read: {error}"[:MAX_PROBLEM])]


def _read_objects(text: str) -> list[ToolCall]:
    """Read objects one after the other, with "; " between them. Text after them is ignored."""
    calls: list[ToolCall] = []
    decoder, at = json.JSONDecoder(), 0
    while text.startswith("{", at):
        try:
            found, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            return [*calls, ToolCall("", {}, f"the call is not valid JSON: {error}")]
        calls.append(_call(found))
        between = _BETWEEN.match(text, end)
        at = between.end() if between else end
    return calls


def _read(text: str) -> ToolCall:
    try:
        return _call(json.loads(text))
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the call is not valid JSON: {error}")


def _read_list(text: str) -> list[ToolCall]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [ToolCall("", {}, f"the calls are not valid JSON: {error}")]
    return [_call(each) for each in found] if isinstance(found, list) else [_call(found)]


def _call(found: Any) -> ToolCall:
    expected = 'expected {"name": …, "arguments": {…}}'
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return ToolCall("", {}, f"the call has no name; {expected}")
    if any("\ud800" <= letter <= "\udfff" for letter in found["name"]):
        # No client can send such a message back. In arguments these are escapes.
        return ToolCall("", {}, f"the name of the call contains a lone surrogate; {expected}")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        return ToolCall(found["name"], {}, f"the arguments are not an object; {expected}")
    return ToolCall(found["name"], arguments)
