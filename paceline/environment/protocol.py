"""Environment: what answers the model in a conversation. One object per episode."""

from collections.abc import Awaitable, Mapping, Sequence
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
    """The reaction of an environment to a message of the model."""

    messages: Sequence[Message] | str = ()  # results of tools, or the next user message
    reward: float = 0.0  # of this turn
    done: bool = False  # the episode has ended


class EnvironmentFailure(Exception):
    """What went wrong in the worker of an environment. The trajectory fails with this text."""


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
