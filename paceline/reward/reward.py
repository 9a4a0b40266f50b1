"""Reward protocol, reward settings, and the choice of a reward from the settings.

Built-in tasks and verifiers run in the controller, functions of the program in its threads, and
functions of files and modules in separate processes. A reward that raises, hangs or does not return
a number is a RewardError, never a reward of 0.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol, Self, TypeGuard

from pydantic import Field, field_validator, model_validator

from paceline import sandbox
from paceline.data.tasks import get_task
from paceline.errors import ConfigError, DataError, RewardError, first_error
from paceline.reward import verify
from paceline.reward.function import RewardFunctionError, as_score, call, function_name
from paceline.reward.judge import JudgeReward, JudgeSettings
from paceline.reward.lookup import IN_PROCESSES, JUDGE, builtin, check_name, locate
from paceline.reward.pool import ProcessReward
from paceline.reward.process import RewardProcess
from paceline.reward.python_tests import TIMEOUT, row_tests
from paceline.reward.threads import CallableReward
from paceline.settings import Settings, automatic
from paceline.suspend import ignore_suspended_time
from paceline.types import Prompt, Score, Trajectory

RewardFunction = Callable[[str, Mapping[str, Any]], Any]


class RewardSettings(Settings):
    function: str | tuple[str, ...] | None = None
    """Reward function reward(completion, row), as "module:function", "file.py:function" or an entry
    point of the group paceline.rewards; a verifier: exact, last_number, boxed, tagged, regex,
    python_tests; "judge", a language model (section reward.judge); or a task. It returns a number,
    or a dict whose "reward" counts and whose other numbers are recorded. A list of them is summed.
    Default: the score of the task."""
    weights: tuple[float, ...] | None = None
    """Weight of each function in the sum. Default: 1 each."""
    model: str | None = None
    """Reward model to use instead of a function: local directory or Hugging Face model ID of a
    sequence-classification model with one label, or "tiny": a built-in one with random weights, to
    try a placement."""
    judge: JudgeSettings | None = None
    timeout_s: float = Field(default=10.0, gt=0)
    """Seconds a custom function may take to score one completion. On timeout the group fails, and
    the process or thread of the function is replaced."""
    workers: int = automatic(1, ge=1)
    """Number of processes that run a custom function. auto: one for every 4 cores, at most 8."""
    pass_env: tuple[str, ...] = ()
    """Environment variables that look like secrets (..._TOKEN, ..._KEY) and that a custom function
    gets nevertheless, as names or patterns such as "OPENAI_*". Other secrets are withheld."""
    allow_weak_sandbox: bool = False
    """Run code that the model wrote (python_tests, paceline.sandbox.run) with limits only where
    bubblewrap does not work. If false, that is an error."""

    @field_validator("function", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        names = value if isinstance(value, list | tuple) else (value,)
        if value is None or (names and all(isinstance(name, str) for name in names)):
            return value
        raise ValueError(
            f"reward.function = {value!r}: expected the name of a function, or a list of names"
        )

    @model_validator(mode="after")
    def _function_or_model(self) -> Self:
        if self.function is not None and self.model is not None:
            raise ValueError(
                f"reward.function = {self.function!r} and reward.model = {self.model!r} "
                "are both set; remove one of them"
            )
        if self.weights is not None and self.model is not None:
            raise ValueError("reward.weights is for functions; remove it or reward.model")
        if self.function is not None:
            _check_weights(self, len(self.names))
        if (self.judge is not None) != (JUDGE in self.names):
            raise ValueError(
                f"reward.function = {JUDGE!r} and the section reward.judge need each other; set "
                "both (reward.judge.model names the judge) or none"
            )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The functions as a list of any length."""
        if self.function is None:
            return ()
        return (self.function,) if isinstance(self.function, str) else self.function


class Reward(Protocol):
    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        """Return one score per trajectory, of finite numbers. Raises RewardError."""
        ...

    async def close(self) -> None: ...


AnyReward = str | RewardFunction | Reward  # a name is that of a function in the settings
Rewards = AnyReward | Sequence[AnyReward]
"""What a program may give as its reward. Several are summed with reward.weights."""


class BuiltinReward:
    """Built-in function that is known to return quickly; it runs in the event loop."""

    def __init__(self, name: str, function: verify.Function) -> None:
        self.name, self._function = name, function

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        try:
            return [self._one(t.text, prompt.row) for t in trajectories]
        except RewardFunctionError as e:
            raise RewardError(f"reward {self.name!r}, prompt {prompt.uid!r}: {e}") from e

    def check(self, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Raise DataError for a row that cannot be scored. Each row comes with its location."""
        for where, row in rows:
            try:
                self._one("", row)
            except RewardFunctionError as e:
                raise DataError(
                    f"{where} cannot be scored with reward.function = {self.name!r}: {e}"
                ) from e

    def _one(self, completion: str, row: Mapping[str, Any]) -> Score:
        return as_score(call(self._function, completion, row), optional=False)

    async def close(self) -> None:
        return


class NoReward:
    """A reward of 0 for a run that does not train on rewards and has none to record."""

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        return [0.0] * len(trajectories)

    async def close(self) -> None:
        return


class WeightedReward:
    """Weighted sum of several rewards. The value of each is recorded under its name.

    A function that returns None does not apply to the row, and the sum leaves it out.
    """

    def __init__(self, parts: Mapping[str, Reward], weights: Sequence[float]) -> None:
        self._parts, self._weights = parts, weights

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_score(part, prompt, trajectories))
                    for part in self._parts.values()
                ]
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        columns = [task.result() for task in tasks]
        return [self._sum(prompt, row) for row in zip(*columns, strict=True)]

    def check(self, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Raise DataError for a row that a built-in function cannot score."""
        checked = BuiltinReward | ProcessReward | JudgeReward
        parts = [part for part in self._parts.values() if isinstance(part, checked)]
        if parts:
            for located in rows:
                for part in parts:
                    part.check([located])

    def processes(self) -> list[RewardProcess]:
        return [process for part in self._parts.values() for process in reward_processes(part)]

    async def close(self) -> None:
        await asyncio.gather(*(part.close() for part in self._parts.values()))

    def _sum(self, prompt: Prompt, scores: Sequence[Score]) -> Score:
        values = {"reward": 0.0}
        for name, weight, score in zip(self._parts, self._weights, scores, strict=True):
            named = dict(score) if isinstance(score, Mapping) else {"reward": score}
            value = named.pop("reward")
            if math.isnan(value):
                continue
            values["reward"] += weight * value
            values[name] = value
            values |= {f"{name}/{key}": number for key, number in named.items()}
        if len(values) == 1:
            raise RewardError(
                f"prompt {prompt.uid!r}: the reward functions {', '.join(self._parts)} all "
                "returned None; expected a number from at least one of them"
            )
        return values


async def _score(
    part: Reward, prompt: Prompt, trajectories: Sequence[Trajectory]
) -> Sequence[Score]:
    return await part.score(prompt, trajectories)


def reward_processes(reward: Reward) -> list[RewardProcess]:
    """Return the processes of a reward that run now."""
    return reward.processes() if isinstance(reward, ProcessReward | WeightedReward) else []


def check_reward(settings: RewardSettings) -> None:
    """Raise ConfigError for a function that does not exist, without importing or running code."""
    for name in settings.names:
        check_name(name)
        _check_sandbox(settings, name)
    if settings.judge is not None:
        settings.judge.key()


def _check_sandbox(settings: RewardSettings, name: str) -> None:
    if name == "python_tests":
        sandbox.check(settings.allow_weak_sandbox)


async def open_reward(
    settings: RewardSettings,
    task: str | None,
    reward: Rewards | None = None,
    prompt_key: str = "prompt",
    run_dir: Path | None = None,
) -> Reward:
    """Load and check the reward: `reward` if given, else the one the settings select.

    The caller closes it. `run_dir`: where a judge keeps its scores.
    """
    ignore_suspended_time(asyncio.get_running_loop())
    given = settings.function if reward is None else reward
    if given is None:
        if task is None:
            raise ConfigError(
                "prompts from data.path need reward.function: "
                "'file.py:function', 'module:function' or a verifier "
                f"({', '.join([*verify.IN_PROCESS, *IN_PROCESSES])}); or reward.model"
            )
        given = get_task(task).spec
    several = isinstance(given, Sequence) and not isinstance(given, str) and not _is_reward(given)
    parts: Sequence[Any] = given if several else [given]  # type: ignore[assignment]
    weights = _check_weights(settings, len(parts))
    judge = JudgeReward(settings.judge, prompt_key, run_dir) if settings.judge else None
    if not several and settings.weights is None:
        return await _open_one(settings, parts[0], judge, optional=False)
    async with AsyncExitStack() as stack:
        opened: list[Reward] = []
        for part in parts:
            opened.append(await _open_one(settings, part, judge, optional=True))
            stack.push_async_callback(opened[-1].close)
        stack.pop_all()  # nothing failed
    return WeightedReward(dict(zip(_unique_names(parts), opened, strict=True)), weights)


async def _open_one(
    settings: RewardSettings, reward: AnyReward, judge: JudgeReward | None, optional: bool
) -> Reward:
    if _is_reward(reward):
        return reward
    if judge is not None and reward == JUDGE:
        return judge
    if not isinstance(reward, str):
        if not callable(reward):
            raise ConfigError(
                f"reward = {reward!r}: expected a function of (completion, row), a name as in "
                "reward.function, or an object with async methods score and close"
            )
        return CallableReward(reward, settings.timeout_s, optional)
    if function := builtin(reward):
        return BuiltinReward(reward, function)
    spec = await asyncio.to_thread(locate, reward)
    await asyncio.to_thread(_check_sandbox, settings, reward)
    pool = ProcessReward(
        spec,
        settings.timeout_s,
        settings.workers,
        optional,
        pass_env=settings.pass_env,
        environment={
            sandbox.ALLOW_WEAK: str(int(settings.allow_weak_sandbox)),
            TIMEOUT: str(settings.timeout_s),
        },
        check_row=row_tests if reward == "python_tests" else None,
    )
    await pool.start()
    return pool


def _is_reward(reward: object) -> TypeGuard[Reward]:
    methods = (getattr(reward, name, None) for name in ("score", "close"))
    return not isinstance(reward, type) and all(map(callable, methods))


def _check_weights(settings: RewardSettings, count: int) -> Sequence[float]:
    weights = (1.0,) * count if settings.weights is None else settings.weights
    if count == 0:
        raise ConfigError("reward is an empty list; expected at least one function")
    if len(weights) != count:
        raise ConfigError(
            f"reward.weights has {len(weights)} number(s) for {count} reward function(s); "
            "expected one for each"
        )
    return weights


def _unique_names(rewards: Sequence[AnyReward]) -> list[str]:
    """Return the names of functions; equal ones, and "reward", which is the sum, get a number."""
    named = [r if isinstance(r, str) and builtin(r) else function_name(r) for r in rewards]
    counts = Counter([*named, "reward"])
    unique: list[str] = []
    for name in named:
        number, found = 1, name if counts[name] == 1 else f"{name}_1"
        while found in unique:
            number += 1
            found = f"{name}_{number}"
        unique.append(found)
    return unique
