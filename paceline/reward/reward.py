"""Reward protocol, reward settings, and the choice of a reward from the settings.

Built-in tasks and verifiers run in the controller; a custom function runs in separate processes. A
reward that raises, hangs or does not return a number is a RewardError, never a reward of 0.
"""

import asyncio
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol, Self

from pydantic import Field, model_validator

from paceline.data.tasks import get_task
from paceline.errors import ConfigError, DataError, RewardError
from paceline.reward import verify
from paceline.reward.process import ProcessReward
from paceline.reward.worker import RewardFunctionError, as_reward, call
from paceline.settings import Settings
from paceline.types import Prompt, Score, Trajectory

GROUP = "paceline.rewards"
RewardFunction = Callable[[str, Mapping[str, Any]], Any]


class RewardSettings(Settings):
    function: str | None = None
    """Reward function reward(completion, row), as "module:function", "file.py:function" or an entry
    point of the group paceline.rewards; or a verifier: exact, last_number, boxed, tagged, regex. It
    returns a number, or a dict whose "reward" counts and whose other numbers are recorded.
    Default: the score of the task."""
    model: str | None = None
    """Reward model to use instead of a function: local directory or Hugging Face model ID of a
    sequence-classification model with one label."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Seconds a custom function may take to score one completion. On timeout its process is killed
    and the group fails."""
    workers: int = Field(default=1, ge=1)
    """Number of processes that run a custom function."""

    @model_validator(mode="after")
    def _function_or_model(self) -> Self:
        if self.function is not None and self.model is not None:
            raise ValueError(
                f"reward.function = {self.function!r} and reward.model = {self.model!r} "
                "are both set; remove one of them"
            )
        return self


class Reward(Protocol):
    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        """Return one score per trajectory, of finite numbers. Raises RewardError."""
        ...

    async def close(self) -> None: ...


class BuiltinReward:
    """Built-in function that is known to return quickly; it runs in the event loop."""

    def __init__(self, name: str, function: verify.Function) -> None:
        self.name, self._function = name, function

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        try:
            return [call(self._function, t.text, prompt.row) for t in trajectories]
        except RewardFunctionError as e:
            raise RewardError(f"reward {self.name!r}, prompt {prompt.uid!r}: {e}") from e

    def check(self, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Raise DataError for a row that cannot be scored. Each row comes with its location."""
        for where, row in rows:
            try:
                call(self._function, "", row)
            except RewardFunctionError as e:
                raise DataError(
                    f"{where} cannot be scored with reward.function = {self.name!r}: {e}"
                ) from e

    async def close(self) -> None:
        return


class CallableReward:
    """Function of the program that started the run, in the same process.

    An async function runs in the event loop, any other in a thread.
    """

    def __init__(self, function: RewardFunction, timeout_s: float) -> None:
        self.name = getattr(function, "__qualname__", repr(function))
        self._function, self._timeout_s = function, timeout_s

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        where = f"reward {self.name!r}, prompt {prompt.uid!r}"
        try:
            async with asyncio.timeout(self._timeout_s):
                values = await asyncio.gather(
                    *(self._one(t.text, prompt.row) for t in trajectories)
                )
                return [as_reward(value) for value in values]
        except RewardFunctionError as e:
            raise RewardError(f"{where}: {e}") from e
        except TimeoutError as e:
            raise RewardError(
                f"{where}: no reply within {self._timeout_s:g} s (reward.timeout_s)"
            ) from e

    async def _one(self, completion: str, row: Mapping[str, Any]) -> Any:
        try:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(completion, row)
            return await asyncio.to_thread(self._function, completion, row)
        except Exception as e:
            raise RewardFunctionError(f"raised {type(e).__name__}: {e}") from e

    async def close(self) -> None:
        return


async def open_reward(
    settings: RewardSettings, task: str | None, function: RewardFunction | None = None
) -> Reward:
    """Load and check the reward: `function` if given, else the one the settings select.

    The caller closes it.
    """
    if function is not None:
        return CallableReward(function, settings.timeout_s)
    name = settings.function
    if name is None:
        if task is None:
            raise ConfigError(
                "prompts from data.path need reward.function: "
                "'file.py:function', 'module:function' or a verifier "
                f"({', '.join([*verify.IN_PROCESS, 'regex'])}); or reward.model"
            )
        chosen = get_task(task)
        return BuiltinReward(chosen.spec, chosen.score)
    if name in verify.IN_PROCESS:
        return BuiltinReward(name, verify.IN_PROCESS[name])
    reward = ProcessReward(
        await asyncio.to_thread(_locate, name), settings.timeout_s, settings.workers
    )
    await reward.start()
    return reward


def _locate(name: str) -> str:
    """Return the "module:function" or "file.py:function" that a name stands for."""
    if ":" in name:
        return name
    if name == "regex":
        return f"{verify.__name__}:regex"
    registered = {e.name: e.value for e in entry_points(group=GROUP)}
    if name in registered:
        return registered[name]
    known = [*verify.IN_PROCESS, "regex", *registered]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    raise ConfigError(
        f"reward.function = {name!r} is neither a verifier nor an entry point of {GROUP!r}{hint} "
        f"Known: {', '.join(known)}. "
        "Write a custom function as 'module:function' or 'file.py:function'."
    )
