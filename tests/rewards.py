"""Rewards that tests hand to the system as a user would: `reward.function = "tests/rewards.py:name"`."""

from typing import Any


def letters(answer: str, row: dict[str, Any]) -> float:
    """Share of letters in the answer: even a random model gets some, so there is always something to learn."""
    return sum(c.isalpha() for c in answer) / 8
