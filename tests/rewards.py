"""Rewards that tests hand to the system as a user would: `reward.function = "tests/rewards.py:name"`."""

from typing import Any


def letters(answer: str, row: dict[str, Any]) -> float:
    """Share of letters in the answer: even a random model gets some, so there is always something to learn."""
    return sum(c.isalpha() for c in answer) / 8


def raises(answer: str, row: dict[str, Any]) -> float:
    raise KeyError("no such column")


def nothing(answer: str, row: dict[str, Any]) -> None:
    return None


def nan(answer: str, row: dict[str, Any]) -> float:
    return float("nan")


def hangs(answer: str, row: dict[str, Any]) -> float:
    while True:
        pass


def sometimes_raises(answer: str, row: dict[str, Any]) -> float:
    if row["prompt"].count("1"):
        raise ValueError("I do not like ones")
    return letters(answer, row)


def always_one(answer: str, row: dict[str, Any]) -> float:
    return 1.0


def prints(answer: str, row: dict[str, Any]) -> float:
    print("looking at", answer)
    return letters(answer, row)


def in_parts(answer: str, row: dict[str, Any]) -> dict[str, float]:
    return {"reward": letters(answer, row), "length": len(answer)}
