"""Custom reward: a plain function of the completion and the dataset row.

    paceline train recipes/hybrid.toml reward.function=examples/custom_reward.py:reward

The function runs in a separate process. A call that exceeds reward.timeout_s is killed. An
exception, a timeout or a result that is not a finite number is an error, never a reward of 0.
"""

from typing import Any


def reward(completion: str, row: dict[str, Any]) -> float:
    """Return the fraction of correct characters, minus 0.1 per missing or extra character."""
    expected = row["answer"]
    correct = sum(a == b for a, b in zip(completion, expected, strict=False)) / len(expected)
    return correct - 0.1 * abs(len(completion) - len(expected))
