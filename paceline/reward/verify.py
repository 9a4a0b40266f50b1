"""Verifiers: does an answer agree with row["answer"]? Each is `(answer, row) -> 0.0 or 1.0`.

The patterns here take time linear in the answer, since they run in the controller on whatever a model writes. `regex` is the
exception (its pattern comes from the data) and is run like a user's function, in a process that can be killed.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

Function = Callable[[str, Mapping[str, Any]], float]

_MINUS = "\u2212"  # the typographic one
_NUMBER = re.compile(rf"(?:(?<!\d)[-+{_MINUS}])?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def exact(answer: str, row: Mapping[str, Any]) -> float:
    """The whole answer is the expected text, spaces around it aside."""
    return float(answer.strip() == _expected(row).strip())


def last_number(answer: str, row: Mapping[str, Any]) -> float:
    """The last number of the answer is the last number of row["answer"], as in GSM8K ("... #### 1,234")."""
    wanted = _last_number(_expected(row))
    if wanted is None:
        raise ValueError(f"row['answer'] holds no number: {_expected(row)[-80:]!r}")
    return float(_last_number(answer) == wanted)


def boxed(answer: str, row: Mapping[str, Any]) -> float:
    r"""The last \boxed{...} of the answer holds the expected text (or the same number)."""
    return float(_same(_last_boxed(answer), _expected(row)))


def tagged(answer: str, row: Mapping[str, Any]) -> float:
    """The last <answer>...</answer> of the answer holds the expected text (or the same number)."""
    head, closing, _ = answer.rpartition("</answer>")
    _, opening, found = head.rpartition("<answer>")
    return float(_same(found if closing and opening else None, _expected(row)))


def regex(answer: str, row: Mapping[str, Any]) -> float:
    """The first group of the last match of row["pattern"] is the expected text (or the same number)."""
    found = None
    for match in re.finditer(row["pattern"], answer, re.DOTALL):
        found = match[1]
    return float(_same(found, _expected(row)))


IN_PROCESS: dict[str, Function] = {"exact": exact, "last_number": last_number, "boxed": boxed, "tagged": tagged}


def _expected(row: Mapping[str, Any]) -> str:
    answer = row.get("answer")
    if answer is None:
        raise ValueError("the row has no 'answer' to compare with")
    if not isinstance(answer, str | int | float | Decimal):
        raise ValueError(f"row['answer'] is {type(answer).__name__}; expected text or a number")
    return str(answer)


def _last_number(text: str) -> Decimal | None:
    last = None
    for match in _NUMBER.finditer(text):
        last = match[0]
    return None if last is None else Decimal(last.replace(_MINUS, "-").translate({ord(","): None, ord("$"): None}))


def _last_boxed(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    depth = 0
    for i in range(start, len(text) if start >= 0 else start):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0 and text[i] == "}":
            return text[start + len(r"\boxed{") : i]
    return None


def _same(found: str | None, wanted: str) -> bool:
    if found is None:
        return False
    found, wanted = found.strip(), wanted.strip()
    if found == wanted:
        return True
    numbers = [_NUMBER.fullmatch(text) for text in (found, wanted)]
    return all(numbers) and _last_number(found) == _last_number(wanted)
