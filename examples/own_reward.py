"""A reward of your own: a plain function of the answer and the data set row.

    paceline train recipes/hybrid.toml reward.function=examples/own_reward.py:reward

It runs in a process of its own; a call that takes longer than reward.timeout_s is killed. Raise, or return anything but a
finite number, and the run says so; it never counts as 0.
"""

from typing import Any


def reward(answer: str, row: dict[str, Any]) -> float:
    """Digits in their right place, minus a little for every character too many or too few."""
    wanted = row["answer"]
    right = sum(a == b for a, b in zip(answer, wanted, strict=False)) / len(wanted)
    return right - 0.1 * abs(len(answer) - len(wanted))
