"""One process that runs a custom reward function, as its parent sees it.

A call that exceeds its deadline kills the process and all its descendants.
"""

import asyncio
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import ConfigError
from paceline.remote.calls import GRACE_S, Calls, Overdue
from paceline.remote.child import Child
from paceline.reward.function import RewardFunctionError, as_optional_reward, as_score
from paceline.types import Score


class RewardProcess(Child):
    """The process and the completions that it scores."""

    def __init__(
        self, function: str, timeout_s: float, optional: bool, environment: Mapping[str, str]
    ) -> None:
        """Start the process. `optional`: the function may return None."""
        arguments = [str(timeout_s), function]
        module = "paceline.reward.worker"
        super().__init__("reward", function, module, arguments, environment, timeout_s)
        self._timeout_s, self._optional = timeout_s, optional

    def submit(
        self, completions: Sequence[str], row: Mapping[str, Any]
    ) -> list[asyncio.Future[Score]]:
        """Send completions to the process. Raises Lost if it has exited or hangs."""
        self.check()
        try:
            packed = pickle.dumps(dict(row))
        except Exception as e:
            raise RewardFunctionError(
                f"cannot be called, because its row cannot be sent to a process: {e}"
            ) from e
        calls = [self.calls.add() for _ in completions]
        numbered = [(number, text) for (number, _), text in zip(calls, completions, strict=True)]
        self.send((numbered, packed))
        return [future for _, future in calls]

    def _receive(self, message: dict[str, Any]) -> None:
        if "number" in message:
            self.calls.finish(message["number"], self._result(message))
        elif "started" in message:
            self.calls.started(message["started"])
        elif "problem" in message:
            problem = f"reward.function = {self.name!r}: {message['problem']}"
            self._loaded.set_exception(ConfigError(problem))
        elif message["ready"]:
            if message["concurrent"]:  # then the process cancels a call at its deadline itself
                self.calls = Calls(self._timeout_s + GRACE_S, self._hang)
            self._loaded.set_result(message["concurrent"])

    def _result(self, message: dict[str, Any]) -> Score | Exception:
        if "problem" in message:
            return RewardFunctionError(message["problem"])
        if "overdue" in message:
            return Overdue()
        try:
            return as_score(as_optional_reward(message["reward"]), self._optional)
        except RewardFunctionError as e:
            return e
