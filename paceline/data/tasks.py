"""Built-in tasks: endless prompts whose answers can be checked, so that a run needs no data set and no network.

A task is written `name` or `name:difficulty` ("reverse", "sort:5"). Its rows are a pure function of (seed, index).

Scoring: an exact answer is worth 1. Where a near miss means something, a wrong answer of the right length earns at most
`PARTIAL`, in proportion to the characters in their right place; anything else is 0. The gap between PARTIAL and 1 keeps the
mean reward close to the share of exact answers, while groups without any exact answer still show which attempt was nearer.
"""

import difflib
import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError

PARTIAL = 0.2

Make = Callable[
    [random.Random, int], tuple[str, str]
]  # (random numbers, difficulty) -> (question, answer)


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of question at one difficulty."""

    name: str
    difficulty: int
    make: Make
    graded: bool  # near misses earn partial credit
    size: int = 8192  # rows in an epoch unless the settings say otherwise; `row` itself has no end

    @property
    def spec(self) -> str:
        return f"{self.name}:{self.difficulty}"

    def row(self, index: int, seed: int) -> dict[str, str]:
        question, answer = self.make(random.Random(f"{self.spec}/{seed}/{index}"), self.difficulty)
        return {"prompt": f"{self.name} {question}=", "answer": answer}

    def score(self, answer: str, row: Mapping[str, Any]) -> float:
        """1 if exact (spaces around it aside), else up to PARTIAL as the module says."""
        given, wanted = answer.strip(), str(row["answer"])
        if given == wanted:
            return 1.0
        if not self.graded or len(given) != len(wanted):
            return 0.0
        return PARTIAL * sum(a == b for a, b in zip(given, wanted, strict=True)) / len(wanted)


def _digits(rng: random.Random, n: int) -> str:
    return "".join(rng.choices(string.digits, k=n))


def _letters(rng: random.Random, n: int, alphabet: str = string.ascii_lowercase) -> str:
    return "".join(rng.choices(alphabet, k=n))


def _copy(rng: random.Random, n: int) -> tuple[str, str]:
    s = _digits(rng, n)
    return s, s


def _reverse(rng: random.Random, n: int) -> tuple[str, str]:
    s = _digits(rng, n)
    return s, s[::-1]


def _sort(rng: random.Random, n: int) -> tuple[str, str]:
    s = _digits(rng, n)
    return s, "".join(sorted(s))


def _max(rng: random.Random, n: int) -> tuple[str, str]:
    s = _digits(rng, n)
    return s, max(s)


def _count(rng: random.Random, n: int) -> tuple[str, str]:
    s, wanted = _letters(rng, n, "abcd"), rng.choice("abcd")
    return f"{wanted} in {s}", str(s.count(wanted))


def _addition(rng: random.Random, n: int) -> tuple[str, str]:
    a, b = rng.randrange(10**n), rng.randrange(10**n)
    return f"{a}+{b}", str(a + b)


def _upper(rng: random.Random, n: int) -> tuple[str, str]:
    s = _letters(rng, n)
    return s, s.upper()


def _rotate(rng: random.Random, n: int) -> tuple[str, str]:
    s = _letters(rng, n)
    return s, s[1:] + s[0]


def _unique(rng: random.Random, n: int) -> tuple[str, str]:
    s = _letters(rng, n, "abcd")
    return s, "".join(dict.fromkeys(s))


def _vowels(rng: random.Random, n: int) -> tuple[str, str]:
    s = _letters(rng, n)
    return s, str(sum(c in "aeiou" for c in s))


@dataclass(frozen=True, slots=True)
class _Kind:
    what: str
    make: Make
    default: int
    hardest: int
    graded: bool = True


_KINDS = {
    "copy": _Kind("n digits as they are", _copy, 5, 64),
    "reverse": _Kind("n digits backwards", _reverse, 5, 64),
    "sort": _Kind("n digits in order", _sort, 5, 64),
    "max": _Kind("the largest of n digits", _max, 5, 64, graded=False),
    "count": _Kind("how often a letter occurs among n", _count, 6, 64, graded=False),
    "addition": _Kind("the sum of two numbers of up to n digits", _addition, 1, 9),
    "upper": _Kind("n letters in capitals", _upper, 5, 64),
    "rotate": _Kind("n letters, the first moved to the end", _rotate, 5, 64),
    "unique": _Kind("n letters, each kept only where it first appears", _unique, 5, 64),
    "vowels": _Kind("how many of n letters are vowels", _vowels, 6, 64, graded=False),
}

TASKS = tuple(_KINDS)


def describe_tasks() -> list[tuple[str, str]]:
    """Name and meaning of every task, with the difficulty it has when none is given."""
    return [(name, f"{kind.what} (n = {kind.default})") for name, kind in _KINDS.items()]


def get_task(spec: str) -> Task:
    """The task a spec such as "reverse" or "sort:5" means."""
    name, colon, number = spec.partition(":")
    kind = _KINDS.get(name)
    if kind is None:
        close = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ConfigError(f"unknown task {name!r}{hint} Built-in tasks: {', '.join(TASKS)}.")
    if not colon:
        return Task(name, kind.default, kind.make, kind.graded)
    difficulty = int(number) if number.isascii() and number.isdigit() else 0
    if not 1 <= difficulty <= kind.hardest:
        raise ConfigError(
            f"task {spec!r}: the difficulty must be a whole number from 1 to {kind.hardest}; did you mean '{name}:{kind.default}'?"
        )
    return Task(name, difficulty, kind.make, kind.graded)
