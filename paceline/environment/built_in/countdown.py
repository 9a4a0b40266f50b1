"""Countdown: make a target out of numbers with + - * / and parentheses, each number used once.

A wrong expression gets feedback and another try. The reward is 1 for a right expression, at any
try. Rows are a pure function of the seed.
"""

import ast
import random
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from paceline.environment.protocol import Message, Reply

MAX_LENGTH = 200  # characters of an expression
_EXPRESSION = re.compile(r"[-+*/()\d\s×÷−]*\d[-+*/()\d\s×÷−]*")
_SIGNS = str.maketrans("×÷−", "*/-")


class Countdown:
    def __init__(
        self, numbers: int = 3, highest: int = 20, tries: int = 3, size: int = 4096
    ) -> None:
        self._tries = tries

    @staticmethod
    def rows(
        seed: int, numbers: int = 3, highest: int = 20, size: int = 4096
    ) -> list[dict[str, Any]]:
        """Return problems that have a solution, each with `numbers` numbers up to `highest`."""
        return [
            _problem(random.Random(f"countdown/{seed}/{index}"), numbers, highest)
            for index in range(size)
        ]

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        self._numbers, self._target = sorted(map(int, row["numbers"])), int(row["target"])
        return None

    async def step(self, message: Message) -> Reply:
        self._tries -= 1
        problem = self._wrong(message["content"])
        if problem is None:
            return Reply(reward=1.0, done=True)
        return Reply(f"{problem} Try again.", done=self._tries <= 0)

    def _wrong(self, text: str) -> str | None:
        """Return what is wrong with the last expression of a message."""
        expression = _last_expression(text)
        if expression is None:
            return "Write an arithmetic expression."
        try:
            value, used = evaluate(expression)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return f"{expression} is not an expression with + - * / and whole numbers."
        except ZeroDivisionError:
            return f"{expression} divides by zero."
        if sorted(used) != self._numbers:
            return f"Use each of {', '.join(map(str, self._numbers))} exactly once."
        if value != self._target:
            return f"{expression} = {value}, not {self._target}."
        return None


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression, and the numbers in it."""
    used: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Sub):
                return left - right
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.Div):
                return left / right
        raise ValueError

    return value(ast.parse(expression, mode="eval").body), used


def _last_expression(text: str) -> str | None:
    """Return the last thing that looks like an expression; the part after "=" is the result."""
    for line in reversed(text[-10 * MAX_LENGTH :].splitlines()):
        found = [part.strip() for part in _EXPRESSION.findall(line.partition("=")[0])]
        if found and len(found[-1]) <= MAX_LENGTH:
            return found[-1].translate(_SIGNS)
    return None


def _problem(rng: random.Random, count: int, highest: int) -> dict[str, Any]:
    while True:
        numbers = [rng.randint(1, highest) for _ in range(count)]
        expression = str(numbers[0])
        for number in numbers[1:]:
            expression = f"({expression} {rng.choice('+-*')} {number})"
        target = int(evaluate(expression)[0])
        if 1 <= target <= 5 * highest:
            rng.shuffle(numbers)
            listed = ", ".join(map(str, numbers))
            prompt = (
                f"Use the numbers {listed}, each exactly once, with + - * / and parentheses to "
                f"make {target}. Write only the expression."
            )
            return {"prompt": prompt, "numbers": numbers, "target": target}
