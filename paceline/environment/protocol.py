"""Environment: what answers the model in a conversation. One object per episode."""

import inspect
import numbers
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.types import Completion

Message = Mapping[str, Any]  # {"role": "user", "content": "…"}


class Generate(Protocol):
    """Maps context tokens to a completion. Interruptions by weight syncs are not visible to it."""

    def __call__(
        self,
        context: tuple[int, ...],
        /,
        *,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
    ) -> Awaitable[Completion]:
        """`max_new_tokens` and `stop` (strings) restrict what the settings of the run allow."""
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """The reaction of an environment to a message of the model.

    Numbers of numpy and torch are converted. A field of another type raises TypeError here, so that
    the error names the line of the environment.
    """

    messages: Sequence[Message] | str = ()  # results of tools, or the next user message
    reward: float = 0.0  # of this turn
    done: bool = False  # the episode has ended

    def __post_init__(self) -> None:
        if not isinstance(self.messages, str):
            if not _are_messages(self.messages):
                raise TypeError(
                    f"Reply.messages = {self.messages!r:.80}; expected text or a list of messages"
                )
            object.__setattr__(self, "messages", list(self.messages))
        object.__setattr__(self, "reward", _number(self.reward))
        object.__setattr__(self, "done", bool(self.done))


class EnvironmentFailure(Exception):
    """What is wrong with a call of an environment. The trajectory fails with this text."""


def first_messages(returned: Any) -> list[Message] | None:
    """Return the messages of `reset`. Raises EnvironmentFailure if it returned something else."""
    if returned is not None and not _are_messages(returned):
        raise EnvironmentFailure(
            f"reset() returned {returned!r:.80}; expected a list of messages, or None"
        )
    return None if returned is None else list(returned)


def _are_messages(value: Any) -> bool:
    """Return whether a value is a list, or something like it, and not one message or its text."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _number(reward: Any) -> float:
    if getattr(reward, "ndim", None) == 0:
        reward = reward.item()  # a scalar of numpy or torch
    if not isinstance(reward, numbers.Real):
        raise TypeError(f"Reply.reward = {reward!r:.80}; expected a number")
    try:
        return float(reward)
    except OverflowError:
        return float("inf")  # which is rejected, as other rewards that are too large


def missing_method(made: Any) -> str | None:
    """Return the first method of an environment class that is missing or not async."""
    for method in ("reset", "step", "close"):
        found = getattr(made, method, None)
        optional = method == "close" and found is None
        if not optional and not inspect.iscoroutinefunction(found):
            return method
    return None


class Environment(Protocol):
    """One episode. Its methods may await: thousands of episodes run at the same time."""

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        """Start the episode of a dataset row; return its first messages, or None for the prompt."""
        ...

    async def step(self, message: Message) -> Reply:
        """React to a message of the model."""
        ...

    async def close(self) -> None:
        """Release what the episode holds. Called once, however the episode ends."""
        ...
