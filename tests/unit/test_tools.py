"""Tools: calls in three formats, results and errors for the model, exact tokens."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from paceline.data.chat import message_problem
from paceline.environment.conversation import Limits
from paceline.environment.search import MAX_BYTES
from paceline.environment.tool_calls import ToolCall, parse_tool_calls
from paceline.environment.tool_use import ToolUse
from paceline.environment.tools import MAX_THREADS, OUTPUT_LENGTH, Toolbox, calculator
from paceline.errors import ConfigError
from paceline.rollout.environment import open_environment
from paceline.types import End, Prompt, Trajectory
from tests.chat_templates import chat_tokenizer, tokenizer_of
from tests.episodes import DATA, Model
from tests.sandboxes import needs_bubblewrap

LIMITS = Limits(6, 4000, 60.0)
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
        (
            '{"name": "f", "parameters": {"a": "x; y"}}; {"name": "g", "parameters": {}}',
            [("f", {"a": "x; y"}), ("g", {})],
        ),
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
        (r'<tool_call>{"name": "\ud800"}</tool_call>', "lone surrogate"),
        ("[TOOL_CALLS] nonsense", "not valid JSON"),
        ('{"name": "f", "parameters": {', "not valid JSON"),
        ('<tool_call>{"name": "f", "arguments": ' + "9" * 9000, "not valid JSON"),
    ],
)
def test_call_that_cannot_be_read_is_reported_to_model(text: str, problem: str) -> None:
    (call,) = parse_tool_calls(text, tokenizer_of("chatml"))
    assert problem in call.problem


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{" + " " * 200_000 + "x",
        "<tool_call>" + " x" * 100_000,
        '{"name": 1}' + "; {}" * 50_000 + "x",
    ],
    ids=["spaces", "words", "objects"],
)
def test_calls_are_read_in_linear_time_when_model_writes_anything(text: str) -> None:
    begun = time.process_time()
    assert parse_tool_calls(text, tokenizer_of("chatml"))[0].problem
    assert time.process_time() - begun < 2


# As a tokenizer describes the format of its model, here with the name outside of the JSON.
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"close_pattern": r"(?=\[CALL\]|<\|im_end\|>)", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\[CALL\](?P<name>\w+)",
            "close": "[/CALL]",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
    },
}


def test_tokenizer_parses_calls_in_format_of_its_model() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.response_template = RESPONSES
    text = '[CALL]add{"a": 1}[/CALL][CALL]add{"a": 2, "b": 3}[/CALL]'
    schemas = Toolbox([add]).schemas
    found = parse_tool_calls(text, tokenizer, schemas)
    assert found == [ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2, "b": 3})]
    assert parse_tool_calls("no call", tokenizer, schemas) == []
    (wrong,) = parse_tool_calls("[CALL]add{a[/CALL]", tokenizer, schemas)
    assert "cannot be read" in wrong.problem and len(wrong.problem) <= 300


class Unit(Enum):
    METER = "m"
    MILE = "mi"


async def describe(
    value: float | None,
    unit: Unit = Unit.METER,
    mode: Literal["short", "long"] = "short",
    parts: list[int] | None = None,
    *,
    table: dict[str, float] | None = None,
) -> Path:
    """Describe a length.

    Args:
        value: The length.
        unit: Its unit.
        mode: How long the text is.
        parts: Numbers.
        table: More numbers.
    """
    assert isinstance(unit, Unit)
    return Path(f"{value}{unit.value}{mode}{parts}{table}")


def test_type_hints_and_docstring_become_schema() -> None:
    (schema,) = Toolbox([describe]).schemas
    assert schema["function"]["name"] == "describe"
    assert schema["function"]["description"] == "Describe a length."
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "value": {"type": "number", "nullable": True, "description": "The length."},
            "unit": {
                "type": "string",
                "enum": ["m", "mi"],
                "description": "Its unit.",
                "default": "m",
            },
            "mode": {
                "type": "string",
                "enum": ["short", "long"],
                "description": "How long the text is.",
                "default": "short",
            },
            "parts": {
                "type": "array",
                "items": {"type": "integer"},
                "nullable": True,
                "description": "Numbers.",
            },
            "table": {
                "type": "object",
                "additionalProperties": {"type": "number"},
                "nullable": True,
                "description": "More numbers.",
            },
        },
        "required": ["value"],
    }


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ({"value": 2, "unit": "mi", "parts": ["1"]}, '"2.0mishort[1]None"'),
        ({"value": None, "table": {"a": 1}}, "\"NonemshortNone{'a': 1.0}\""),
        ({"value": 2, "unit": "km"}, "error: argument 'unit': Input should be 'm' or 'mi', got"),
        ({"value": 2, "mode": 3}, "error: argument 'mode': Input should be 'short' or 'long'"),
        ({"value": 2, "parts": [1, "x"]}, "error: argument 'parts'[1]: Input should be a valid"),
    ],
)
def test_arguments_get_types_of_function(arguments: Any, result: str) -> None:
    assert asyncio.run(Toolbox([describe]).call("describe", arguments)).startswith(result)


class Shelf:
    def take(self, count: int) -> int:
        """Take some.

        Args:
            count: How many.
        """
        return count


def test_bound_method_is_tool() -> None:
    toolbox = Toolbox([Shelf().take])
    assert list(toolbox.schemas[0]["function"]["parameters"]["properties"]) == ["count"]
    assert asyncio.run(toolbox.call("take", {"count": 3})) == "3"


def untyped(a) -> None:  # type: ignore[no-untyped-def]
    """Do nothing.

    Args:
        a: Nothing.
    """


def variadic(*values: int) -> None:
    """Do nothing.

    Args:
        values: Nothing.
    """


def opaque(shelf: Shelf) -> None:
    """Do nothing.

    Args:
        shelf: Nothing.
    """


def streaming() -> Iterator[str]:
    """Yield text."""
    yield "a"


async def streaming_later() -> AsyncIterator[str]:
    """Yield text."""
    yield "a"


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (streaming, "it is a generator; return the whole result instead"),
        (streaming_later, "it is a generator"),
        (untyped, "missing a type hint"),
        (variadic, r"parameter '\*values: int' has no name"),
        (opaque, "JSON cannot express the type 'Shelf'"),
        (Shelf.take, "a method without its object"),
    ],
)
def test_function_that_cannot_be_schema_is_rejected(function: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Toolbox([function])


def test_two_tools_with_one_name_are_rejected() -> None:
    with pytest.raises(ConfigError, match="two tools are called 'add'"):
        Toolbox([add, add])


def test_search_finds_passage_in_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "cats.md").write_text("# Cats\n\nA cat sleeps sixteen hours a day.\n")
    (tmp_path / "dogs.txt").write_text("\n" * 900 + "A dog barks at night.\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\xff cat cat cat")
    (tmp_path / ".hidden").write_text("cat cat cat")
    toolbox = Toolbox([f"search:{tmp_path}"])
    assert toolbox.schemas[0]["function"]["name"] == "search"
    found = asyncio.run(toolbox.call("search", {"query": "How long does a CAT sleep?"}))
    assert found.splitlines()[0].endswith("cats.md:1") and "sixteen hours" in found
    assert "PNG" not in found and ".hidden" not in found
    assert asyncio.run(toolbox.call("search", {"query": "zebra"})).startswith("nothing found")


def test_search_ignores_large_file_that_is_not_text(tmp_path: Path) -> None:
    with (tmp_path / "model.bin").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    (tmp_path / "notes.txt").write_text("A cat sleeps.")
    found = asyncio.run(Toolbox([f"search:{tmp_path}"]).call("search", {"query": "cat"}))
    assert found == "notes.txt:1\nA cat sleeps."


def test_search_result_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("\n".join("word " * 5000 for _ in range(9)))
    found = asyncio.run(Toolbox([f"search:{tmp_path}"]).call("search", {"query": "word " * 9000}))
    assert 1000 < len(found) <= OUTPUT_LENGTH + 100


def test_search_in_directory_without_text_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no text files"):
        Toolbox([f"search:{tmp_path}"])
    with pytest.raises(ConfigError, match="no such directory"):
        Toolbox(["search:nowhere"])


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def leave(cancelled: bool) -> str:
    """End the program.

    Args:
        cancelled: In another way.
    """
    raise asyncio.CancelledError if cancelled else SystemExit(0)


async def flood() -> str:
    """Return too much."""
    return "x" * 10 * OUTPUT_LENGTH


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("add", {"a": 2}, "3"),
        ("add", '{"a": 2, "b": 3}', "5"),
        ("add", {"a": "2"}, "3"),
        ("add", {}, "error: the argument 'a' is missing; expected a, b"),
        ("add", {"c": 2}, "error: unknown argument 'c'; expected a, b"),
        ("add", {"a": "x"}, "error: argument 'a': Input should be a valid integer"),
        ("add", {"a": "x" * 10**6}, "error: argument 'a': Input should be a valid integer"),
        ("x" * 10**6, {}, "error: there is no tool 'xxx"),
        ("subtract", {}, "error: there is no tool 'subtract'; there is add, flood, leave, calc"),
        ("leave", {"cancelled": False}, "error: SystemExit: 0"),
        ("leave", {"cancelled": True}, "error: CancelledError"),
        ("calculator", {"expression": "(3 + 4) * 6"}, "42"),
        ("calculator", {"expression": "__import__('os')"}, "error: ValueError: only numbers"),
        ("calculator", {"expression": "9**9**9"}, "error: ValueError: only numbers"),
        ("calculator", {"expression": "1/0"}, "error: ZeroDivisionError"),
    ],
)
def test_call_returns_result_or_what_is_wrong(name: str, arguments: Any, result: str) -> None:
    toolbox = Toolbox([add, flood, leave, "calculator"])
    text = asyncio.run(toolbox.call(name, arguments))
    assert text.startswith(result) and len(text) <= OUTPUT_LENGTH


def test_long_result_is_shortened() -> None:
    result = asyncio.run(Toolbox([flood]).call("flood", {}))
    assert len(result) < OUTPUT_LENGTH + 100 and result.endswith("characters more")


@needs_bubblewrap
def test_python_tool_runs_in_sandbox() -> None:
    toolbox = Toolbox(["python"])
    assert asyncio.run(toolbox.call("python", {"code": "print(6 * 7)"})) == "42\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        network = f"import socket; socket.create_connection({server.getsockname()!r})"
        assert "Error" in asyncio.run(toolbox.call("python", {"code": network}))


def test_function_without_description_is_rejected() -> None:
    def undocumented(a: int) -> int:
        return a

    with pytest.raises(ConfigError, match="'undocumented' cannot be described to the model"):
        Toolbox([undocumented])
    with pytest.raises(ConfigError, match=r"tools = 'browser': unknown tool; expected calc"):
        Toolbox(["browser"])
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        Toolbox(["calculater"])


def play(model: Model, tool: Any) -> Trajectory:
    loop = open_environment(None, model.tokenizer, DATA, LIMITS, [tool])
    trajectory = asyncio.run(loop.run(Prompt("q", (), "", ROW), model.generate))
    assert isinstance(trajectory, Trajectory)
    return trajectory


def test_model_calls_tools_until_message_has_no_call() -> None:
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'
    model = Model(call, f"{call}\n{call}", "It is 42.")
    trajectory = play(model, "calculator")
    assert trajectory.end is End.DONE and trajectory.text == "It is 42."
    first, second, third = model.seen
    assert '"name": "calculator"' in first, "the model does not see the tool"
    assert second.count("<tool_response>\n42\n</tool_response>") == 1
    assert third.count("<tool_response>\n42\n</tool_response>") == 3


def test_model_sees_no_output_when_tool_returns_blank_text() -> None:
    def blank() -> str:
        """Return a line break."""
        return "\n"

    async def step() -> Any:
        tools = Toolbox([blank])
        use = ToolUse(tools, tools.schemas, tokenizer_of("chatml"))
        text = '<tool_call>{"name": "blank", "arguments": {}}</tool_call>'
        return await use.step({"role": "assistant", "content": text})

    (message,) = asyncio.run(step()).messages
    assert message["content"] == "(no output)" and message_problem([message]) is None


def test_call_marked_by_special_token_is_run() -> None:
    call = '[TOOL_CALLS] [{"name": "echo", "arguments": {"text": "\\ud800"}}]'
    model = Model(call, "Done.", template="mistral")
    model.tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})

    def echo(text: str) -> str:
        """Return the text.

        Args:
            text: The text.
        """
        return f"<{text}>"

    trajectory = play(model, echo)
    assert trajectory.text == "Done." and len(trajectory.turns) == 2
    assert "<?>" in model.seen[1], "a lone surrogate reached the tokenizer"


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


def test_tool_that_raises_stop_iteration_returns_error() -> None:
    def find(name: str) -> str:
        """Find a name.

        Args:
            name: The name.
        """
        return next(known for known in ("a", "b") if known == name)

    async def call() -> str:
        async with asyncio.timeout(60):
            return await Toolbox([find]).call("find", {"name": "c"})

    assert asyncio.run(call()) == "error: RuntimeError: StopIteration()"


def test_decorated_async_function_is_awaited() -> None:
    @wraps(flood)
    def logged() -> Any:
        return flood()

    assert asyncio.run(Toolbox([logged]).call("flood", {})).startswith("xxx")


def test_result_as_json_keeps_characters_of_other_scripts() -> None:
    def city() -> dict[str, str]:
        """Return a city."""
        return {"name": "東京"}

    assert asyncio.run(Toolbox([city]).call("city", {})) == '{"name": "東京"}'


def test_numbers_and_arrays_of_numpy_are_json_in_a_result() -> None:
    def measure() -> Any:
        """Measure."""
        return {"mean": np.float32(1.5), "counts": np.arange(3), "any": np.bool_(True)}

    expected = '{"mean": 1.5, "counts": [0, 1, 2], "any": true}'
    assert asyncio.run(Toolbox([measure]).call("measure", {})) == expected


def test_large_result_becomes_json_outside_of_the_event_loop() -> None:
    class Slow:
        def __str__(self) -> str:
            return threading.current_thread().name

    def look() -> Any:
        """Look."""
        return [Slow()]

    assert asyncio.run(Toolbox([look]).call("look", {})) == '["tool"]'
