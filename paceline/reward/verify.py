"""Built-in verifiers: functions `(completion, row) -> 0.0 or 1.0` that compare with row["answer"].

They take time linear in the completion, because they run in the controller on any text a model
generates. `regex` is the exception: its pattern comes from the data, so it runs like a custom
function in a process that can be killed.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

Function = Callable[[str, Mapping[str, Any]], float]

LONGEST_NUMBER = 60  # characters; longer ones are compared as text
_MINUS = "\u2212"  # the typographic minus sign
_FORMATTING = re.compile(r"\s|\\?\$|\\left(?![a-z])|\\right(?![a-z])|\\[,!; ]")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}")
_FRACTION = re.compile(
    rf"([-{_MINUS}]?)(?:\\frac\{{(\d{{1,30}})\}}\{{(\d{{1,30}})\}}|(\d{{1,30}})/(\d{{1,30}}))"
)
# "1,2" is not a number.
_GROUPED = re.compile(rf"[-+{_MINUS}]?(?:(?:\d+|\d{{1,3}}(?:,\d{{3}})+)(?:\.\d+)?|\.\d+)")
# The 42 of "...42" has no decimal point.
_NUMBER = re.compile(rf"(?:(?<!\d)[-+{_MINUS}])?\$?(?:\d[\d,]*(?:\.\d+)?|(?<!\.)\.\d+)")

_DIGIT = re.compile(r"\d")
_NUMBER_CHARACTERS = re.compile(rf"[-+{_MINUS}$\d,.]*")


def exact(completion: str, row: Mapping[str, Any]) -> float:
    """Compare the whole completion with the reference answer, ignoring surrounding spaces."""
    return float(completion.strip() == _expected(row).strip())


def last_number(completion: str, row: Mapping[str, Any]) -> float:
    """Compare the last number of the completion with the last number of row["answer"].

    Suits GSM8K, whose reference answers end in "#### 1,234".
    """
    wanted = _last_number(_expected(row))
    if wanted is None:
        raise ValueError(f"row['answer'] contains no number: {_expected(row)[-80:]!r}")
    return float(_last_number(completion) == wanted)


def boxed(completion: str, row: Mapping[str, Any]) -> float:
    r"""Compare the last \boxed{...} of the completion as text, number or fraction."""
    return float(_same(_last_boxed(completion), _result(row)))


def tagged(completion: str, row: Mapping[str, Any]) -> float:
    """Compare the last <answer>...</answer> of the completion as text, number or fraction."""
    head, closing, _ = completion.rpartition("</answer>")
    _, opening, found = head.rpartition("<answer>")
    return float(_same(found if closing and opening else None, _result(row)))


def regex(completion: str, row: Mapping[str, Any]) -> float:
    """Compare the first group of the last match of row["pattern"] as text, number or fraction."""
    found = None
    for match in re.finditer(row["pattern"], completion, re.DOTALL):
        found = match[1]
    return float(_same(found, _result(row)))


IN_PROCESS: dict[str, Function] = {
    "exact": exact,
    "last_number": last_number,
    "boxed": boxed,
    "tagged": tagged,
}


def _expected(row: Mapping[str, Any]) -> str:
    answer = row.get("answer")
    if answer is None and "answer" in row:
        raise ValueError("row['answer'] is None; expected text or a number")
    if answer is None:
        raise ValueError(
            f"the row has no 'answer' to compare with, but {', '.join(map(repr, row))}; "
            "set data.answer_key to one of them"
        )
    if not isinstance(answer, str | int | float | Decimal):
        raise ValueError(f"row['answer'] is {type(answer).__name__}; expected text or a number")
    return str(answer)


def _result(row: Mapping[str, Any]) -> str:
    r"""Return the result in row["answer"], which may be a worked solution.

    The result is the last \boxed{...} (MATH), else the text after #### (GSM8K), else all of it.
    """
    expected = _expected(row)
    return _last_boxed(expected) or expected.rpartition("####")[2]


def _last_number(text: str) -> Decimal | None:
    # Most of a completion is not its last number, so the search begins at the end.
    backwards = text[::-1]
    digit = _DIGIT.search(backwards)
    if digit is None:
        return None
    around = _NUMBER_CHARACTERS.match(backwards, digit.start())
    assert around is not None, "it matches at least the digit"
    *_, match = _NUMBER.finditer(around[0][::-1])
    last = match[0]
    return Decimal(last.replace(_MINUS, "-").translate({ord(","): None, ord("$"): None}))


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
    found, wanted = _plain(found), _plain(wanted)
    return found == wanted or ((number := _number(found)) is not None and number == _number(wanted))


def _plain(text: str) -> str:
    """Remove formatting: spaces, dollar signs, bracket and fraction sizes, a final period."""
    text = _TEXT.sub(r"\1", _FORMATTING.sub("", text.strip().rstrip(".")))
    return text.replace("dfrac", "frac").replace("tfrac", "frac")


def _number(text: str) -> Fraction | None:
    if len(text) > LONGEST_NUMBER:
        return None
    if parts := _FRACTION.fullmatch(text):
        sign, over, under = parts[1], parts[2] or parts[4], parts[3] or parts[5]
        return Fraction(int(over), int(under)) * (-1 if sign else 1) if int(under) else None
    return Fraction(_last_number(text) or 0) if _GROUPED.fullmatch(text) else None
