"""TRL's reward functions as one Reward: columns as lists, several functions with weights."""

import asyncio
import inspect
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.data.chat import conversation
from paceline.errors import ConfigError, RewardError
from paceline.reward.function import function_name, is_async
from paceline.reward.threads import CallableReward
from paceline.types import Prompt, Score, Trajectory

if TYPE_CHECKING:
    from paceline.reward.model import RewardModel

log = logging.getLogger(__name__)

OWN = ("prompt", "completion", "completion_ids")  # columns that are not passed by their names
PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")


class ColumnReward:
    """Reward functions that score the completions of a prompt together.

    Functions run as other functions of the program do (`reward/threads.py`). Those that are not
    async are called one at a time, because functions written for TRL do not expect to be called
    concurrently.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        weights: Sequence[float],
        timeout_s: float,
        extras: Mapping[str, Any],
    ) -> None:
        """`extras` are keyword arguments for functions that accept them, such as trainer_state."""
        self._functions, self._weights = functions, weights
        self._timeout_s, self._extras = timeout_s, extras
        self._accepted = {name: _accepted(function) for name, function in functions.items()}
        self._async_names = ", ".join(name for name, f in functions.items() if is_async(f))
        self._runners: dict[str, CallableReward] = {}
        self._one_at_a_time = asyncio.Lock()

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        given = {**arguments(prompt.row, trajectories), **self._extras}
        results = await asyncio.gather(
            *(self._call(name, prompt, trajectories, given) for name in self._functions)
        )
        return self._sum(prompt, list(zip(*results, strict=True)))

    async def _call(
        self,
        name: str,
        prompt: Prompt,
        trajectories: Sequence[Trajectory],
        given: Mapping[str, Any],
    ) -> list[float | None]:
        function, accepted = self._functions[name], self._accepted[name]
        chosen = {key: value for key, value in given.items() if not accepted or key in accepted}
        # The last is the result; a call may be repeated. The call gets a copy of lists in its row.
        returned = deque[Any](maxlen=1)
        row = {"function": function, "arguments": chosen, "returned": returned}
        call = replace(prompt, row=row)
        if is_async(function):
            await self._runner(self._async_names).score(call, trajectories[:1])
        else:
            async with self._one_at_a_time:
                await self._runner(name).score(call, trajectories[:1])
        return _numbers(returned[-1], len(trajectories), name, prompt)

    def _runner(self, name: str) -> CallableReward:
        """Return what calls a function; all async ones share a runner, and so an event loop."""
        if name not in self._runners:
            kind = _AsyncCall if name == self._async_names else _Call
            self._runners[name] = CallableReward(kind(name), self._timeout_s)
        return self._runners[name]

    def _sum(self, prompt: Prompt, rows: Sequence[Sequence[float | None]]) -> list[Score]:
        """Return the weighted sum of each completion, over the functions that apply to it."""
        sums = [
            sum(w * v for w, v in zip(self._weights, row, strict=True) if v is not None)
            if any(value is not None for value in row)
            else None
            for row in rows
        ]
        known = [value for value in sums if value is not None]
        if len(known) < len(rows):
            log.warning(
                "prompt %r: no reward function applies to %d of %d completions; they are not "
                "learned from",
                prompt.uid,
                len(rows) - len(known),
                len(rows),
            )
        # A completion without a reward gets the mean of the others, so that its advantage is 0.
        mean = math.fsum(known) / len(known) if known else 0.0
        return [
            {"reward": mean if total is None else total}
            | {name: v for name, v in zip(self._functions, row, strict=True) if v is not None}
            for total, row in zip(sums, rows, strict=True)
        ]

    async def close(self) -> None:
        for runner in self._runners.values():
            await runner.close()


class _Call:
    """A function of columns as a function of (completion, row), which stores what it returns."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, _completion: str, row: Mapping[str, Any]) -> float:
        row["returned"].append(row["function"](**row["arguments"]))
        return 0.0


class _AsyncCall(_Call):
    async def __call__(self, _completion: str, row: Mapping[str, Any]) -> float:  # type: ignore[override]
        row["returned"].append(await row["function"](**row["arguments"]))
        return 0.0


class RewardModelFunction:
    """Reward model as a function, for a list that has functions, too."""

    def __init__(self, name: str) -> None:
        self.__name__ = name.rstrip("/").split("/")[-1]
        self._name = name
        self._model: RewardModel | None = None

    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        from paceline.reward.model import RewardModel

        if self._model is None:
            self._model = RewardModel(self._name, "float32", batch_tokens=4096)
        prompt = prompts[0]  # the same for all completions
        texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
        return self._model.score(str(prompt), list(conversation(prompt)), texts)


def arguments(row: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return prompts, completions and the other columns as lists, one entry per completion."""
    count, prompt = len(trajectories), row["prompt"]
    texts = [trajectory.text for trajectory in trajectories]
    return {
        **{name: [value] * count for name, value in row.items() if name not in OWN},
        "prompts": [prompt] * count,
        "completions": texts
        if isinstance(prompt, str)
        else [[{"role": "assistant", "content": text}] for text in texts],
        "completion_ids": [t.turns[-1].completion.tokens.tolist() for t in trajectories],
    }


def name_functions(functions: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the functions by the names of their metrics, which differ from each other."""
    named: dict[str, Callable[..., Any]] = {}
    for number, function in enumerate(functions):
        name = function_name(function)
        while name in {*named, "reward"}:  # which is the name of the sum
            name = f"{name}_{number}"
        named[name] = function
    return named


def check_arguments(
    functions: Mapping[str, Callable[..., Any]], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Raise ConfigError for a function that needs what neither TRL passes nor the dataset has."""
    columns = dict.fromkeys(column for row in rows for column in row if column not in OWN)
    given = dict.fromkeys((*PASSED, *columns))
    for name, function in functions.items():
        if isinstance(function, type):
            raise ConfigError(f"reward_funcs: {name} is a class; pass an instance of it: {name}()")
        try:
            accepted = _accepted(function)
            chosen = [key for key in given if accepted is None or key in accepted]
            inspect.signature(function).bind(**dict.fromkeys(chosen))
        except ValueError:
            continue  # a built-in without a signature
        except TypeError as e:
            raise ConfigError(
                f"reward_funcs: {name}{inspect.signature(function)} cannot be called: {e}. It gets "
                f"keyword arguments: {', '.join(PASSED)}, and the columns of the dataset: "
                f"{', '.join(map(str, columns)) or 'there is none besides the prompt'}"
            ) from e


def weights_of(weights: Sequence[float] | None, count: int) -> list[float]:
    try:
        found = [1.0] * count if weights is None else [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise ConfigError(
            f"reward_weights = {weights!r}; expected a list of numbers, one per function"
        ) from None
    if len(found) != count:
        raise ConfigError(
            f"reward_weights has {len(found)} entries and reward_funcs {count}; "
            "expected one weight per function"
        )
    return found


def _accepted(function: Callable[..., Any]) -> set[str] | None:
    """Return the names of the arguments that a function accepts; None: all."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in without a signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def _numbers(values: Any, count: int, name: str, prompt: Prompt) -> list[float | None]:
    where = f"reward {name!r}, prompt {prompt.uid!r}"
    try:
        if isinstance(values, str | Mapping | Set):  # they have no numbers in order
            raise TypeError
        found = [None if value is None else float(value) for value in values]
    except (TypeError, ValueError):
        raise RewardError(
            f"{where}: returned {values!r:.80}; expected a list of numbers or None"
        ) from None
    if len(found) != count:
        raise RewardError(f"{where}: returned {len(found)} rewards for {count} completions")
    for value in found:
        if value is not None and not math.isfinite(value):
            raise RewardError(f"{where}: returned {value}; expected a finite number or None")
    return found
