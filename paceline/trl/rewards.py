"""Reward functions with the names and arguments of `trl.rewards`."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from paceline.reward.verify import boxed

THINKING = re.compile(r"<think>(?:(?!</?think>).)*</think>(?:(?!</?think>).)*", re.DOTALL)


def accuracy_reward(
    completions: Sequence[Sequence[dict[str, str]]], solution: Sequence[str], **kwargs: Any
) -> list[float | None]:
    r"""Return 1.0 if the last \boxed{...} of a completion is the solution, else 0.0.

    Compares text, numbers and fractions. TRL's function also compares equivalent formulas, with the
    library math_verify; it works here too.
    """
    return [
        boxed(completion[-1]["content"], {"answer": answer})
        for completion, answer in zip(completions, solution, strict=True)
    ]


def think_format_reward(
    completions: Sequence[Sequence[dict[str, str]]], **kwargs: Any
) -> list[float]:
    """Return 1.0 if a completion is one <think>...</think> followed by text, else 0.0."""
    return [
        float(THINKING.fullmatch(completion[-1]["content"]) is not None)
        for completion in completions
    ]


def get_soft_overlong_punishment(
    max_completion_len: int, soft_punish_cache: int
) -> Callable[..., list[float]]:
    """Return DAPO's penalty: 0 up to the last `soft_punish_cache` tokens, then falling to -1."""

    def soft_overlong_punishment_reward(
        completion_ids: Sequence[Sequence[int]], **kwargs: Any
    ) -> list[float]:
        free = max_completion_len - soft_punish_cache
        return [
            -1.0
            if len(ids) > max_completion_len
            else -max(0, len(ids) - free) / max(1, soft_punish_cache)
            for ids in completion_ids
        ]

    return soft_overlong_punishment_reward
