"""Tools: calls in three formats, results and errors for the model, exact tokens."""

import asyncio
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data.prompts import DataSettings
from paceline.environment.conversation import Limits
from paceline.environment.tool_calls import ToolCall, parse_tool_calls
from paceline.environment.tools import MAX_THREADS, OUTPUT_LENGTH, Toolbox, calculator
from paceline.errors import ConfigError
from paceline.rollout.environment import open_environment
from paceline.types import Completion, End, Finish, Prompt
from tests.chat_templates import chat_tokenizer
from tests.sandboxes import needs_bubblewrap

tokenizer_of = cache(chat_tokenizer)
LIMITS, DATA = Limits(6, 4000, 60.0), DataSettings(path="rows.jsonl")
ROW = {"prompt": "What is 6 times 7?"}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("It is 42.", []),
        (
            'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
            [("f", {"a": 1})],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "g", "arguments": {"b": "x"}}</tool_call>',
            [("f", {}), ("g", {"b": "x"})],
        ),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 2}}]', [("f", {"a": 2})]),
        ('{"name": "f", "parameters": {"a": 3}}', [("f", {"a": 3})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 4}"}</tool_call>', [("f", {"a": 4})]),
    ],
)
def test_calls_of_three_formats_are_read(text: str, calls: list[Any]) -> None:
    found = parse_tool_calls(text, tokenizer_of("chatml"))
    assert found == [ToolCall(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{</tool_call>", "not valid JSON"),
        ("<tool_call>" + "[" * 9000, "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "has no name"),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', "not an object"),
        ("[TOOL_CALLS] nonsense", "not valid JSON"),
    ],
)
def test_call_that_cannot_be_read_is_reported_to_model(text: str, problem: str) -> None:
    (call,) = parse_tool_calls(text, tokenizer_of("chatml"))
    assert problem in call.problem


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def flood() -> str:
    """Return too much."""
    return "x" * 10 * OUTPUT_LENGTH


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("add", {"a": 2}, "3"),
        ("add", '{"a": 2, "b": 3}', "5"),
        ("add", {"c": 2}, "error: TypeError: missing a required argument: 'a'"),
        ("add", {"a": "x"}, "error: TypeError: can only concatenate"),
        ("subtract", {}, "error: there is no tool 'subtract'; there is add, flood, calculator"),
        ("calculator", {"expression": "(3 + 4) * 6"}, "42"),
        ("calculator", {"expression": "__import__('os')"}, "error: ValueError: only numbers"),
        ("calculator", {"expression": "9**9**9"}, "error: ValueError: only numbers"),
        ("calculator", {"expression": "1/0"}, "error: ZeroDivisionError"),
    ],
)
def test_call_returns_result_or_what_is_wrong(name: str, arguments: Any, result: str) -> None:
    toolbox = Toolbox([add, flood, "calculator"])
    assert asyncio.run(toolbox.call(name, arguments)).startswith(result)


def test_long_result_is_shortened() -> None:
    result = asyncio.run(Toolbox([flood]).call("flood", {}))
    assert len(result) < OUTPUT_LENGTH + 100 and result.endswith("characters more")


@needs_bubblewrap
def test_python_tool_runs_in_sandbox() -> None:
    toolbox = Toolbox(["python"])
    assert asyncio.run(toolbox.call("python", {"code": "print(6 * 7)"})) == "42\n"
    network = "import socket; socket.create_connection(('127.0.0.1', 22))"
    assert "Error" in asyncio.run(toolbox.call("python", {"code": network}))


def test_function_without_description_is_rejected() -> None:
    def undocumented(a: int) -> int:
        return a

    with pytest.raises(ConfigError, match="'undocumented' cannot be described to the model"):
        Toolbox([undocumented])
    with pytest.raises(ConfigError, match=r"tools = 'browser': unknown tool; expected calc"):
        Toolbox(["browser"])


def test_model_calls_tools_until_message_has_no_call(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("chatml with tools")
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'
    texts = [call + "<|im_end|>", f"{call}\n{call}<|im_end|>", "It is 42.<|im_end|>"]
    contexts: list[str] = []

    async def generate(context: tuple[int, ...]) -> Completion:
        contexts.append(tokenizer.decode(context))
        tokens = np.array(tokenizer.encode(texts[len(contexts) - 1]), np.int32)
        zeros = np.zeros(len(tokens), np.float32)
        return Completion(tokens, zeros, zeros.astype(np.int32), Finish.STOP)

    loop = open_environment(None, tokenizer, DATA, LIMITS, ["calculator"])
    trajectory = asyncio.run(loop.run(Prompt("q", (), "", ROW), generate))
    assert trajectory.end is End.DONE and trajectory.text == "It is 42."
    assert '"name": "calculator"' in contexts[0], "the model does not see the tool"
    assert contexts[1].count("<tool_response>\n42\n</tool_response>") == 1
    assert contexts[2].count("<tool_response>\n42\n</tool_response>") == 3


def test_tools_and_environment_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"contradicts rollout\.environment"):
        open_environment("a.py:B", tokenizer_of("chatml"), DATA, LIMITS, ["calculator"])


def test_calculator_writes_whole_numbers_as_such() -> None:
    assert calculator("10 / 4 * 2") == "5"


def test_hanging_tool_does_not_hold_up_others() -> None:
    release = threading.Event()

    def hang() -> str:
        """Wait for ever."""
        release.wait()
        return "late"

    async def main() -> str:
        toolbox = Toolbox([hang, add])
        hanging = [asyncio.create_task(toolbox.call("hang", {})) for _ in range(MAX_THREADS)]
        await asyncio.sleep(0)
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)
        return await toolbox.call("add", {"a": 1})

    try:
        assert asyncio.run(main()) == "2"
    finally:
        release.set()
