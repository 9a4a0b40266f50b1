"""Which row comes next, when the order should follow what the model can do. The default order needs none of this.

A curriculum of your own is a class `C(num_rows, seed)` with these methods, named in `data.curriculum = "file.py:C"`.
"""

import random
from collections.abc import Sequence
from typing import Any, Protocol

from paceline.errors import ConfigError
from paceline.plugins import PluginError, find_callable


class Curriculum(Protocol):
    def pick(self, seq: int) -> int:
        """The row (0 .. num_rows - 1) for position `seq` of the stream."""
        ...

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        """The attempts at this row were trained on and had these rewards."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as JSON."""
        ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class Adaptive:
    """Prefers rows the model sometimes solves: of a few drawn at random, the one whose mean reward is nearest to a half.

    Rows never seen count as a half, so each gets its turn.
    """

    DRAWN = 4

    def __init__(self, num_rows: int, seed: int) -> None:
        self._num_rows, self._seed = num_rows, seed
        self._means: dict[int, float] = {}

    def pick(self, seq: int) -> int:
        rng = random.Random(f"{self._seed}.{seq}")
        drawn = [rng.randrange(self._num_rows) for _ in range(self.DRAWN)]
        return min(drawn, key=lambda row: abs(self._means.get(row, 0.5) - 0.5))

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
            f"data.curriculum = {name!r}: use 'adaptive', 'module:Class' or 'file.py:Class'"
        )
    try:
        curriculum: Curriculum = find_callable(name)(num_rows, seed)
    except PluginError as problem:
        raise ConfigError(f"data.curriculum = {name!r}: {problem}") from None
    missing = [
        method
        for method in ("pick", "observe", "state", "load_state")
        if not hasattr(curriculum, method)
    ]
    if missing:
        raise ConfigError(
            f"data.curriculum = {name!r} has no method {missing[0]!r}; a curriculum has pick, observe, state and load_state"
        )
    return curriculum
