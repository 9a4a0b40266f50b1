"""Countdown: reach a number with three others, each used once. Makes rows, scores completions."""

import ast
import operator
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LARGEST = 30
EXPRESSION = re.compile(r"[\d+\-*/() ]*\d[\d+\-*/() ]*")


def rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield solvable rows, all different."""
    numbers = random.Random(seed)
    seen: set[tuple[Any, ...]] = set()
    while len(seen) < count:
        chosen = tuple(numbers.randint(1, LARGEST) for _ in range(3))
        first, second = (numbers.choice((operator.add, operator.sub, operator.mul)) for _ in "12")
        target = second(first(chosen[0], chosen[1]), chosen[2])
        key = (tuple(sorted(chosen)), target)
        if not 1 <= target <= 200 or key in seen:
            continue
        seen.add(key)
        listed = ", ".join(map(str, numbers.sample(chosen, 3)))
        yield {
            "prompt": f"Use each of the numbers {listed} once, with + - * / and brackets, to make "
            f"{target}. Answer with the expression alone, for example (3 + 4) * 5.",
            "numbers": list(chosen),
            "target": target,
        }


def solved(completion: str, row: Mapping[str, Any]) -> float:
    """Return 1 for a right expression, 0.1 for one that uses the numbers, 0 otherwise."""
    found = [text.strip() for text in EXPRESSION.findall(completion.split("=")[0])]
    expression = max(found, key=len, default="")
    if sorted(map(int, re.findall(r"\d+", expression))) != sorted(row["numbers"]):
        return 0.0
    try:
        value = _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return 0.0
    return 1.0 if abs(value - row["target"]) < 1e-6 else 0.1


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not an expression of numbers")
