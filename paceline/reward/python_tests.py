"""Reward `python_tests`: runs the tests of a row against the code of a completion, in the sandbox.

row["tests"], or the column of data.answer_key, is one test or a list of them. A test is Python code
that raises unless it passes ("assert add(1, 2) == 3"), or a dict with the "input" and "output" of a
program. The reward is 1 if all tests pass, else 0: a share of the tests would reward code that only
covers their simple cases. The share is recorded as `passed`.
"""

import ast
import json
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import sandbox

TIMEOUT = "PACELINE_REWARD_TIMEOUT_S"  # how a run tells its reward processes
SHARE_OF_TIMEOUT = 0.75  # the rest is for starting the sandbox
HARNESS = Path(__file__).with_name("harness.py")
OUTPUT_KB = 1024
_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)

Test = str | Mapping[str, str]


def python_tests(completion: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Return the reward of the completion, with the share of tests that pass as "passed"."""
    tests = row_tests(row)
    code = code_of(completion)
    end = time.monotonic() + SHARE_OF_TIMEOUT * float(os.environ.get(TIMEOUT, "10"))
    snippets = [test for test in tests if isinstance(test, str)]
    passed = _run_snippets(code, snippets, end) if snippets else 0
    for test in tests:
        if not isinstance(test, str):
            passed += _prints(code, test, end)
    return {"reward": float(passed == len(tests)), "passed": passed / len(tests)}


def row_tests(row: Mapping[str, Any]) -> Sequence[Test]:
    """Return the tests of a row. Raises ValueError if it has none or one that cannot be run."""
    found = row.get("tests", row.get("answer"))
    if found is None:
        raise ValueError(
            f"the row has no 'tests', but {', '.join(map(repr, row))}; "
            "set data.answer_key to the column with the tests"
        )
    tests = list(found) if isinstance(found, list | tuple) else [found]
    if not tests:
        raise ValueError("the row has an empty list of tests; expected at least one")
    for test in tests:
        if isinstance(test, str):
            try:
                ast.parse(test)
            except (SyntaxError, ValueError) as e:
                raise ValueError(f"the test {test[:100]!r} is not valid Python: {e}") from None
        elif not isinstance(test, Mapping) or not {"input", "output"} <= test.keys():
            raise ValueError(
                f"the test {str(test)[:100]} is {type(test).__name__}; "
                "expected Python code, or a dict with 'input' and 'output'"
            )
    return tests


def code_of(completion: str) -> str:
    """Return the last code block of a completion, or all of it if it has none."""
    blocks: list[str] = _BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def _run_snippets(code: str, tests: Sequence[str], end: float) -> int:
    """Return how many tests pass. They run one after another in one process."""
    split = [_without_expected(test) for test in tests]
    nonce = secrets.token_hex(16)
    given = {"nonce": nonce, "code": code, "tests": [source for source, _ in split]}
    result = _run(HARNESS.read_text(), json.dumps(given), end)
    found: dict[int, list[str]] = {}
    for line in result.stdout.splitlines() if result else []:
        token, _, message = line.partition(" ")
        if secrets.compare_digest(token.encode(), nonce.encode()):
            report = json.loads(message)
            found[report["test"]] = report["values"]
    return sum(_equal(found.get(index), wanted) for index, (_, wanted) in enumerate(split))


def _without_expected(test: str) -> tuple[str, list[Any]]:
    """Return the test without the literals that values are compared with, and these literals.

    A solution that knew them, or an object that equals everything, would pass. So the values of
    `assert f(1) == 2` are compared outside of the sandbox.
    """
    tree, expected = ast.parse(test), []
    for index, node in enumerate(tree.body):
        match node:
            case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
                for value, literal in ((left, right), (right, left)):
                    try:
                        expected.append(ast.literal_eval(literal))
                    except (ValueError, TypeError, MemoryError, RecursionError):
                        continue
                    call = ast.Call(ast.Name("__check__", ast.Load()), [value], [])
                    tree.body[index] = ast.Expr(call)
                    break
    return ast.unparse(ast.fix_missing_locations(tree)), expected


def _equal(values: list[str] | None, expected: Sequence[Any]) -> bool:
    if values is None or len(values) != len(expected):
        return False
    try:
        return [ast.literal_eval(value) for value in values] == list(expected)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False  # an object that no literal describes


def _prints(code: str, test: Mapping[str, str], end: float) -> bool:
    """Return whether the code as a program turns the input of the test into its output."""
    result = _run(code, test["input"], end)
    return result is not None and result.ok and _lines(result.stdout) == _lines(test["output"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _run(code: str, stdin: str, end: float) -> sandbox.Result | None:
    """Run a program until the end, which is a time; None if that is over."""
    left = end - time.monotonic()
    return sandbox.run(code, stdin=stdin, timeout_s=left, output_kb=OUTPUT_KB) if left > 0 else None
