"""Reward functions that tests select like a user: `reward.function = "tests/rewards.py:name"`."""

from typing import Any


def letters(completion: str, row: dict[str, Any]) -> float:
    """Count letters, divided by 8. Even a random model earns some reward, so it can learn."""
    return sum(c.isalpha() for c in completion) / 8


def raises(completion: str, row: dict[str, Any]) -> float:
    raise KeyError("no such column")


def nothing(completion: str, row: dict[str, Any]) -> None:
    return None


def nan(completion: str, row: dict[str, Any]) -> float:
    return float("nan")


def hangs(completion: str, row: dict[str, Any]) -> float:
    while True:
        pass


def sometimes_raises(completion: str, row: dict[str, Any]) -> float:
    if row["prompt"].count("1"):
        raise ValueError("the prompt contains a 1")
    return letters(completion, row)


def always_one(completion: str, row: dict[str, Any]) -> float:
    return 1.0


def prints(completion: str, row: dict[str, Any]) -> float:
    print("scoring", completion)
    return letters(completion, row)


def in_parts(completion: str, row: dict[str, Any]) -> dict[str, float]:
    return {"reward": letters(completion, row), "length": len(completion)}


def allocates(completion: str, row: dict[str, Any]) -> float:
    return len(bytearray(500_000_000)) / 5e8
