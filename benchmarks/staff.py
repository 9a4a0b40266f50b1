"""Staff directory: questions that need a tool, or two tool calls one after the other.

The directory is computed from a hash, so that a model can neither know it nor derive it. The result
of the first of two calls is the argument of the second.
"""

import hashlib
import random
from collections.abc import Iterator
from typing import Any

FIRST, LAST = 1000, 9999  # numbers of the employees
# Qwen2.5-Coder writes calls as Markdown code without the example, in spite of its chat template.
SYSTEM = """Answer with the help of the tools. You may need several calls, one after the other. \
Write a call in this form, without anything else:
<tool_call>
{"name": "find_manager", "arguments": {"employee": "E1234"}}
</tool_call>"""
TOOLS = ("benchmarks.staff:find_manager", "benchmarks.staff:find_room")


def find_manager(employee: str) -> str:
    """Return the ID of the manager of an employee.

    Args:
        employee: ID of the employee, for example E1234.
    """
    return f"E{_entry('manager', employee)}"


def find_room(employee: str) -> str:
    """Return the number of the room in which an employee works.

    Args:
        employee: ID of the employee, for example E1234.
    """
    return str(_entry("room", employee))


def rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield questions about different employees. Half of them need two calls, the others one.

    The others are there because an untrained model almost never makes two right calls.
    """
    numbers = random.Random(seed).sample(range(FIRST, LAST + 1), count)
    for index, employee in enumerate(f"E{number}" for number in numbers):
        manager = find_manager(employee)
        question, answer = (
            (f"Who is the manager of employee {employee}?", manager[1:]),
            (f"In which room does the manager of employee {employee} work?", find_room(manager)),
            (f"In which room does employee {employee} work?", find_room(employee)),
            (f"In which room does the manager of employee {employee} work?", find_room(manager)),
        )[index % 4]
        yield {"prompt": f"{question} Answer with the number.", "answer": answer}


def _entry(column: str, employee: str) -> int:
    number = employee.strip().removeprefix("E")
    if not number.isascii() or not number.isdigit() or not FIRST <= int(number) <= LAST:
        raise ValueError(
            f"there is no employee {employee!r:.40}; expected an ID, for example E1234"
        )
    digest = hashlib.sha256(f"{column} {int(number)}".encode()).digest()
    return FIRST + int.from_bytes(digest[:8], "big") % (LAST + 1 - FIRST)
