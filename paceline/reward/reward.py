"""The protocol of a reward, and how the settings choose one.

Trusted code (built-in tasks and verifiers) runs right in the controller; a user's function runs in processes of its own. A
reward that raises, hangs or returns something else than a number is a RewardError; it is never turned into 0.
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
    """reward(answer, row) -> number (or a dict: its "reward" counts, other numbers are recorded) as "module:function",
    "file.py:function" or an entry point of the group paceline.rewards; or a verifier: exact, last_number, boxed, tagged, regex.
    Unset: the task's own."""
    model: str | None = None
    """Score with a reward model instead: a folder or hub id of a sequence-classification model with one label."""
    timeout_s: float = Field(default=10.0, gt=0)
    """A user's function that takes longer for one answer is killed, and the answer's group fails."""
    workers: int = Field(default=1, ge=1)
    """Processes for a user's function."""

    @model_validator(mode="after")
    def _one_judge(self) -> Self:
        if self.function is not None and self.model is not None:
            raise ValueError(
                f"reward.function = {self.function!r} and reward.model = {self.model!r} are both set; keep one of them"
            )
        return self


class Reward(Protocol):
    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        """One score per trajectory, of finite numbers. Raises RewardError."""
        ...

    async def close(self) -> None: ...


class BuiltinReward:
    """A function that is known to return at once."""

    def __init__(self, name: str, function: verify.Function) -> None:
        self.name, self._function = name, function

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        try:
            return [call(self._function, t.text, prompt.row) for t in trajectories]
        except RewardFunctionError as e:
            raise RewardError(f"reward {self.name!r}, prompt {prompt.uid!r}: {e}") from e

    def check(self, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Refuse rows, given with where they stand, that no answer could be compared with. Raises DataError."""
        for where, row in rows:
            try:
                call(self._function, "", row)
            except RewardFunctionError as e:
                raise DataError(
                    f"{where} cannot be judged with reward.function = {self.name!r}: {e}"
                ) from e

    async def close(self) -> None:
        return


class CallableReward:
    """A function of the program that started the run, in its own process: async in the event loop, otherwise in threads beside it."""

    def __init__(self, function: RewardFunction, timeout_s: float) -> None:
        self.name, self._function, self._timeout_s = (
            getattr(function, "__qualname__", repr(function)),
            function,
            timeout_s,
        )

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        where = f"reward {self.name!r}, prompt {prompt.uid!r}"
        try:
            async with asyncio.timeout(self._timeout_s):
                return [
                    as_reward(value)
                    for value in await asyncio.gather(
                        *(self._one(t.text, prompt.row) for t in trajectories)
                    )
                ]
        except RewardFunctionError as e:
            raise RewardError(f"{where}: {e}") from e
        except TimeoutError as e:
            raise RewardError(
                f"{where}: no answer within {self._timeout_s:g} s (reward.timeout_s)"
            ) from e

    async def _one(self, answer: str, row: Mapping[str, Any]) -> Any:
        try:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(answer, row)
            return await asyncio.to_thread(self._function, answer, row)
        except Exception as e:
            raise RewardFunctionError(f"raised {type(e).__name__}: {e}") from e

    async def close(self) -> None:
        return


async def open_reward(
    settings: RewardSettings, task: str | None, own: RewardFunction | None = None
) -> Reward:
    """The reward the settings ask for, or the caller's own, loaded, checked and ready. Close it at the end."""
    if own is not None:
        return CallableReward(own, settings.timeout_s)
    name = settings.function
    if name is None:
        if task is None:
            raise ConfigError(
                "prompts from data.path need reward.function: 'file.py:function', 'module:function' or a verifier "
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
    """The "module:function" or "file.py:function" behind a name."""
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
        f"reward.function = {name!r} is neither a verifier nor an entry point of {GROUP!r}{hint} Known: {', '.join(known)}; "
        "a function of your own is 'module:function' or 'file.py:function'."
    )
