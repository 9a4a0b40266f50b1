"""Tool calls in the text of a completion.

A tokenizer that knows the format of its model parses it. For others, this module knows the three
common formats: <tool_call>{…}</tool_call> (Qwen, Hermes, SmolLM), [TOOL_CALLS] [{…}] (Mistral), and
a completion that is a JSON object (Llama 3).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
MISTRAL = "[TOOL_CALLS]"
LLAMA = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    problem: str = ""  # the call cannot be read


def parse_tool_calls(text: str, tokenizer: "PreTrainedTokenizerBase") -> list[ToolCall]:
    """Return the calls of a completion in their order, including those that cannot be read."""
    if getattr(tokenizer, "response_template", None):
        parsed: Any = tokenizer.parse_response(text)
        return [_call(found.get("function", found)) for found in parsed.get("tool_calls") or ()]
    if "<tool_call>" in text:
        return [_read(found) for found in TAGGED.findall(text)]
    if MISTRAL in text:
        return _read_list(text.partition(MISTRAL)[2])
    stripped = text.strip().removeprefix(LLAMA).strip()
    if stripped.startswith("{") and '"name"' in stripped:
        return [_read(part) for part in stripped.split("; ")]
    return []


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
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        return ToolCall(found["name"], {}, f"the arguments are not an object; {expected}")
    return ToolCall(found["name"], arguments)
