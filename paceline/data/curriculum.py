"""Curricula: an order of rows that follows the rewards of the model. The default order uses none.

A custom curriculum is a class `C(num_rows, seed)` with the methods of `Curriculum`, selected with
`data.curriculum = "file.py:C"`.
"""

import random
from collections.abc import Sequence
from typing import Any, Protocol

from paceline.errors import ConfigError
from paceline.plugins import PluginError, find_callable


class Curriculum(Protocol):
    def pick(self, seq: int) -> int:
        """Return the row (0 .. num_rows - 1) for position `seq` of the stream."""
        ...

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        """Learn from the rewards of the trajectories of a row, after they were trained on."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class Adaptive:
    """Curriculum that prefers rows the model sometimes solves.

    It samples a few rows and picks the one whose mean reward is closest to 0.5. A row without
    rewards counts as 0.5, so that new rows are picked too.
    """

    CANDIDATES = 4

    def __init__(self, num_rows: int, seed: int) -> None:
        self._num_rows, self._seed = num_rows, seed
        self._means: dict[int, float] = {}

    def pick(self, seq: int) -> int:
        rng = random.Random(f"{self._seed}.{seq}")
        candidates = [rng.randrange(self._num_rows) for _ in range(self.CANDIDATES)]
        return min(candidates, key=lambda row: abs(self._means.get(row, 0.5) - 0.5))

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        mean = sum(rewards) / len(rewards)
        self._means[row] = mean if row not in self._means else 0.5 * (self._means[row] + mean)

    def state(self) -> dict[str, Any]:
        return {str(row): mean for row, mean in self._means.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._means = {int(row): mean for row, mean in state.items()}


def load_curriculum(name: str, num_rows: int, seed: int) -> Curriculum:
    if name == "adaptive":
        return Adaptive(num_rows, seed)
    if ":" not in name:
        raise ConfigError(
            f"data.curriculum = {name!r}: expected 'adaptive', 'module:Class' or 'file.py:Class'"
        )
    try:
        curriculum: Curriculum = find_callable(name)(num_rows, seed)
    except PluginError as problem:
        raise ConfigError(f"data.curriculum = {name!r}: {problem}") from None
    for method in ("pick", "observe", "state", "load_state"):
        if not hasattr(curriculum, method):
            raise ConfigError(
                f"data.curriculum = {name!r} has no method {method!r}; "
                "expected pick, observe, state and load_state"
            )
    return curriculum
