"""The agent loop: how one attempt at a prompt unfolds. It sees `generate` and nothing of engines, weights or batches."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from paceline.types import Completion, Prompt, Trajectory, Turn

Generate = Callable[[tuple[int, ...]], Awaitable[Completion]]
"""Context tokens in, completion out. Interruptions by weight syncs are resumed inside; the caller never sees them."""


class Environment(Protocol):
    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """One attempt. Raises RolloutError when it cannot be finished."""
        ...


class SingleTurn:
    """Ask once, take the answer."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        completion = await generate(prompt.tokens)
        return Trajectory(turns=(Turn(prompt.tokens, completion),), text=self._decode(completion.tokens.tolist()))
