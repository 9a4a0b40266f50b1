"""Curricula: an order of rows that follows the rewards of the model. The default order uses none.

A custom curriculum is a class `C(num_rows, seed)` with the methods of `Curriculum`, selected with
`data.curriculum = "file.py:C"`.
"""

import json
import os
import random
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

from paceline.errors import ConfigError, DataError
from paceline.plugins import FAILURES, PluginError, find_callable
from paceline.printable import describe_error


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


class CustomCurriculum:
    """Curriculum of the user. Its failures name the setting."""

    def __init__(self, name: str, curriculum: Curriculum) -> None:
        self._name, self._curriculum = name, curriculum

    def pick(self, seq: int) -> int:
        row: int = self._call("pick", seq)
        return row

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        self._call("observe", row, rewards)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._call("state")
        try:
            json.dumps(state)
        except (TypeError, ValueError) as e:
            raise DataError(
                f"data.curriculum = {self._name!r}: state() is saved in checkpoints; expected JSON "
                f"values ({e})"
            ) from e
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        self._call("load_state", state)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._curriculum, method)(*arguments)
        except FAILURES as e:
            raise DataError(f"data.curriculum = {self._name!r}: {method}() {_raised(e)}") from e


def _raised(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(last.filename)}:{last.lineno}"
    return f"raised {describe_error(error)} ({where})"


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
    except FAILURES as e:
        raise ConfigError(f"data.curriculum = {name!r}: creating it {_raised(e)}") from e
    for method in ("pick", "observe", "state", "load_state"):
        if not hasattr(curriculum, method):
            raise ConfigError(
                f"data.curriculum = {name!r} has no method {method!r}; "
                "expected pick, observe, state and load_state"
            )
    return CustomCurriculum(name, curriculum)
