"""Reward `python_tests`: runs the tests of a row against the code of a completion, in the sandbox.

row["tests"], or the column of data.answer_key, is one test or a list of them. A test is Python code
that raises unless it passes ("assert add(1, 2) == 3"), or a dict with the "input" and "output" of a
program. The reward is 1 if all tests pass, else 0: a fraction of them would reward code that only
covers their simple cases. The fraction is recorded as `passed`.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import sandbox
from paceline.reward.used_names import used_names
from paceline.sandbox.runner import run_pair

TIMEOUT = "PACELINE_REWARD_TIMEOUT_S"  # how a run tells its reward processes
FRACTION_OF_TIMEOUT = 0.75  # the rest is for starting the sandbox
HARNESS = Path(__file__).with_name("harness.py")
OUTPUT_KB = 1024
_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)

Test = str | Mapping[str, str]


def python_tests(completion: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Return the reward of the completion, with the fraction of tests that pass as "passed"."""
    tests = row_tests(row)
    code = code_of(completion)
    end = time.monotonic() + FRACTION_OF_TIMEOUT * float(os.environ.get(TIMEOUT, "10"))
    snippets = [test for test in tests if isinstance(test, str)]
    passed = _run_snippets(code, snippets, end) if snippets else 0
    for test in tests:
        if not isinstance(test, str):
            passed += _prints(code, test, end)
    return {"reward": float(passed == len(tests)), "passed": passed / len(tests)}


def row_tests(row: Mapping[str, Any]) -> Sequence[Test]:
    """Return the tests of a row. Raises ValueError if it has none or one that cannot be run."""
    filled = {name: value for name, value in row.items() if value is not None}
    found = filled.get("tests", filled.get("answer"))
    if found is None:
        raise ValueError(
            f"the row has no 'tests', but {', '.join(map(repr, filled))}; "
            "set data.answer_key to the column with the tests"
        )
    tests = list(found) if isinstance(found, list | tuple) else [found]
    if not tests:
        raise ValueError("the row has an empty list of tests; expected at least one")
    for test in tests:
        if isinstance(test, str):
            try:
                used = used_names(test)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
                why = str(e) or "too deeply nested"
                raise ValueError(f"the test {test[:100]!r} is not valid Python: {why}") from None
            if not used.names:
                raise ValueError(
                    f"the test {test[:100]!r} uses nothing of the solution; expected a call of it, "
                    "for example check(add) after a definition of check"
                )
        elif not isinstance(test, Mapping) or not all(
            isinstance(test.get(name), str) for name in ("input", "output")
        ):
            raise ValueError(
                f"the test {str(test)[:100]} is {type(test).__name__}; "
                "expected Python code, or a dict with 'input' and 'output' as text"
            )
    return tests


def code_of(completion: str) -> str:
    """Return the last code block of a completion, or all of it if it has none."""
    blocks: list[str] = _BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def _run_snippets(code: str, tests: Sequence[str], end: float) -> int:
    """Return how many tests pass. They run one after another in one process, the code in another.

    The solution cannot reach the tests: it gets arguments and returns plain data.
    """
    given = [{"source": test, **vars(used_names(test))} for test in tests]
    if (left := end - time.monotonic()) <= 0:
        return 0
    programs = _program("serve", code), _program("run", given)
    return len(run_pair(*programs, timeout_s=left, output_kb=OUTPUT_KB).stdout.split())


def _program(function: str, argument: Any) -> str:
    """Return a program that calls a function of the harness, and ends without exit handlers."""
    call = f"{function}({argument!r})"
    return f"{HARNESS.read_text()}\ntry:\n    {call}\nfinally:\n    os._exit(0)\n"


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
