"""Tools: Python functions that the model may call. Their type hints and docstrings are the schema.

Built in: `calculator`, `python`, which runs a program in the sandbox, and `search:DIRECTORY`, which
searches text files.
"""

import ast
import asyncio
import difflib
import inspect
import json
import math
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from paceline import sandbox
from paceline.environment.search import search_tool
from paceline.environment.tool_function import ArgumentError, ToolFunction
from paceline.environment.user_code import is_failure
from paceline.errors import ConfigError
from paceline.plugins import PluginError, find_callable
from paceline.printable import describe_error

Tool = Callable[..., Any]
OUTPUT_LENGTH = 4000  # characters of a result that the model gets
MAX_THREADS = 32  # functions that are not async and run at the same time

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
MAX_EXPRESSION = 200  # characters


def calculator(expression: str) -> str:
    """Compute an arithmetic expression with + - * / // % and parentheses.

    Args:
        expression: The expression, for example (3 + 4) * 5.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"the expression has more than {MAX_EXPRESSION} characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        found: int | float = _BINARY[type(node.op)](_value(node.left), _value(node.right))
        return found
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    raise ValueError(f"only numbers, + - * / // % and parentheses, not {ast.unparse(node)!r}")


def python(code: str) -> str:
    """Run a Python program and return what it prints. It has no network and no files.

    Args:
        code: The program.
    """
    result = sandbox.run(code)
    if result.ok:
        return result.stdout
    end = f"it reached its limit of {result.stopped}" if result.stopped else "it failed"
    return f"({end}, exit code {result.exit_code})\n{result.stdout}\n{result.stderr}".strip()


BUILT_IN: dict[str, Tool] = {"calculator": calculator, "python": python}
SEARCH = "search"  # with the directory: "search:docs"
DESCRIPTIONS = (
    ("calculator", "computes an arithmetic expression"),
    ("python", "runs a program in the sandbox"),
    ("search:DIRECTORY", "finds passages in the text files of a directory (BM25)"),
)


class Toolbox:
    """The tools of a run."""

    def __init__(self, tools: Sequence[str | Tool], describe: bool = True) -> None:
        """Open tools by name ("calculator", "file.py:function") or as functions.

        Without `describe` there are no schemas, which need transformers.
        """
        self._tools: dict[str, ToolFunction] = {}
        self._room = asyncio.Semaphore(MAX_THREADS)
        for tool in tools:
            found = ToolFunction(_open(tool) if isinstance(tool, str) else tool, describe)
            if found.name in self._tools:
                raise ConfigError(f"rollout.tools: two tools are called {found.name!r}; rename one")
            self._tools[found.name] = found
        self.schemas = [tool.schema for tool in self._tools.values() if tool.schema]

    async def call(self, name: str, arguments: Mapping[str, Any] | str) -> str:
        """Return the result of a call as text; for a failed call, what is wrong with it."""
        if name not in self._tools:
            return f"error: there is no tool {name!r:.80}; there is {', '.join(self._tools)}"
        tool = self._tools[name]
        try:
            given = tool.arguments(
                json.loads(arguments) if isinstance(arguments, str) else arguments
            )
            if tool.is_async:
                result = await tool.function(**given)
            else:
                async with self._room:
                    result = await in_thread(partial(_called, tool.function, given))
                if inspect.isawaitable(result):  # a decorator hides that the function is async
                    result = await result
            result = _as_text(result)
        except ArgumentError as problem:
            return f"error: {problem}"
        except BaseException as error:
            if not is_failure(error):
                raise
            return f"error: {describe_error(error)}"[:OUTPUT_LENGTH]
        if len(result) > OUTPUT_LENGTH:
            return f"{result[:OUTPUT_LENGTH]}\n… {len(result) - OUTPUT_LENGTH} characters more"
        return str(result)


def _called(function: Tool, given: Mapping[str, Any]) -> Any:
    """Return the result of a call as text; something to await as it is."""
    result = function(**given)
    return result if inspect.isawaitable(result) else _as_text(result)


def _as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    return json.dumps(result, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)  # of numpy or torch


def _open(name: str) -> Tool:
    kind, colon, argument = name.partition(":")
    if kind == SEARCH:
        return search_tool(argument)
    if name in BUILT_IN:
        if name == "python":
            sandbox.check()
        return BUILT_IN[name]
    if not colon:
        known = [*BUILT_IN, SEARCH]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? Expected" if close else "expected"
        raise ConfigError(
            f"rollout.tools = {name!r}: unknown tool; {hint} {', '.join(BUILT_IN)}, "
            '"search:DIRECTORY" or "file.py:function"'
        )
    try:
        return find_callable(name)
    except PluginError as problem:
        raise ConfigError(f"rollout.tools = {name!r}: {problem}") from None


async def in_thread(call: Callable[[], Any]) -> Any:
    """Run on a new thread. One that hangs is left behind, so that others do not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error else done.set_result(result)

    def run() -> None:
        result, failed = None, None
        try:
            result = call()
        except BaseException as error:
            # A future cannot have StopIteration.
            usable = isinstance(error, Exception) and not isinstance(error, StopIteration)
            failed = error if usable else RuntimeError(repr(error))
            failed.__traceback__ = error.__traceback__  # for messages that name the line
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(finish, result, failed)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return await done
