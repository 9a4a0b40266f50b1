"""TRL's reward functions as one Reward: columns as lists, several functions with weights."""

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.data.chat import conversation
from paceline.errors import ConfigError, RewardError
from paceline.types import Prompt, Score, Trajectory

if TYPE_CHECKING:
    from paceline.reward.model import RewardModel

log = logging.getLogger(__name__)

OWN = ("prompt", "completion", "completion_ids")  # columns that are not passed by their names


class ColumnReward:
    """Reward functions that score the completions of a prompt together.

    A function that is not async runs in a thread, one call at a time, because functions written for
    TRL do not expect to be called concurrently. Async functions run in the event loop.
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
        self._thread = asyncio.Lock()

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        given = arguments(prompt.row, trajectories) | self._extras
        results = await asyncio.gather(
            *(self._call(name, prompt, given, len(trajectories)) for name in self._functions)
        )
        return self._sum(prompt, list(zip(*results, strict=True)))

    async def _call(
        self, name: str, prompt: Prompt, given: Mapping[str, Any], count: int
    ) -> list[float | None]:
        function, accepted = self._functions[name], self._accepted[name]
        chosen = {key: value for key, value in given.items() if not accepted or key in accepted}
        where = f"reward function {name!r}, prompt {prompt.uid!r}"
        try:
            if is_async(function):
                async with asyncio.timeout(self._timeout_s):
                    values = await function(**chosen)
            else:
                async with self._thread, asyncio.timeout(self._timeout_s):
                    values = await asyncio.to_thread(function, **chosen)
        except TimeoutError as error:
            raise RewardError(
                f"{where}: no result within {self._timeout_s:g} s (reward.timeout_s)"
            ) from error
        except Exception as error:
            raise RewardError(f"{where}: raised {type(error).__name__}: {error}") from error
        return _numbers(values, count, where)

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
        return


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
        plain = getattr(function, "func", function)  # of functools.partial
        name = getattr(plain, "__name__", type(plain).__name__)
        # "reward" is the name of the sum.
        named[name if name not in {*named, "reward"} else f"{name}_{number}"] = function
    return named


def weights_of(weights: Sequence[float] | None, count: int) -> list[float]:
    found = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(found) != count:
        raise ConfigError(
            f"reward_weights has {len(found)} entries and reward_funcs {count}; "
            "expected one weight per function"
        )
    return found


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with `async def __call__`
    )


def _accepted(function: Callable[..., Any]) -> set[str] | None:
    """Return the names of the arguments that a function accepts; None: all."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in without a signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def _numbers(values: Any, count: int, where: str) -> list[float | None]:
    try:
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
