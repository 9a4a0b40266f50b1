"""Built-in tasks: unlimited generated prompts with checkable answers, without dataset or network.

A task is written `name` or `name:difficulty` ("reverse", "sort:5"). Its rows are a pure function of
(seed, index).

An exact completion scores 1. In graded tasks, a wrong completion of the right length earns up to
`PARTIAL`, in proportion to the characters in their right place. Anything else scores 0. The gap
between PARTIAL and 1 keeps the mean reward close to the fraction of exact completions, while groups
without an exact completion still get different rewards.
"""

import difflib
import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError

PARTIAL = 0.2
BUILT_IN_MODELS = ("tiny", "tiny-teacher")  # one of each for every task, see tiny.py

# (random numbers, difficulty) -> (question, reference answer)
Make = Callable[[random.Random, int], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of question at one difficulty."""

    name: str
    difficulty: int
    make: Make
    graded: bool  # near misses earn partial credit
    size: int = 8192  # rows per epoch unless data.limit is set; `row` accepts any index

    @property
    def spec(self) -> str:
        return f"{self.name}:{self.difficulty}"

    def row(self, index: int, seed: int) -> dict[str, str]:
        question, answer = self.make(random.Random(f"{self.spec}/{seed}/{index}"), self.difficulty)
        return {"prompt": f"{self.name} {question}=", "answer": answer}

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """Return 1 if exact, ignoring surrounding spaces, else up to PARTIAL (see the module)."""
        given, wanted = completion.strip(), str(row["answer"])
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
    "copy": _Kind("n digits unchanged", _copy, 5, 64),
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
    """Return name and description of every task, with its default difficulty."""
    return [(name, f"{kind.what} (n = {kind.default})") for name, kind in _KINDS.items()]


def get_task(spec: str) -> Task:
    """Return the task for a spec such as "reverse" or "sort:5"."""
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
            f"task {spec!r}: expected a difficulty from 1 to {kind.hardest}; "
            f"did you mean '{name}:{kind.default}'?"
        )
    return Task(name, difficulty, kind.make, kind.graded)
