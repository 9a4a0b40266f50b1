"""The agent loop: how one attempt at a prompt unfolds. It sees `generate` and nothing of engines, weights or batches.

One of your own (several turns, tools) is a class `E(tokenizer)` with the method `run`, named in `rollout.environment = "file.py:E"`.
"""

import inspect
import math
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from paceline.data.chat import stop_token_ids
from paceline.errors import ConfigError, PacelineError, RolloutError
from paceline.plugins import PluginError, find_callable
from paceline.types import Completion, Prompt, Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Generate = Callable[[tuple[int, ...]], Awaitable[Completion]]
"""Context tokens in, completion out. Interruptions by weight syncs are resumed inside; the caller never sees them."""


class Environment(Protocol):
    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """One attempt. Raises RolloutError when it cannot be finished."""
        ...


MakeEnvironment = Callable[["PreTrainedTokenizerBase"], Environment]


class SingleTurn:
    """Ask once, take the answer."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        completion = await generate(prompt.tokens)
        return Trajectory(
            turns=(Turn(prompt.tokens, completion),), text=self._decode(completion.tokens.tolist())
        )


class CustomEnvironment:
    """A user's environment. Whatever goes wrong in it is a RolloutError, and what it gives is what the model was shown and said."""

    def __init__(self, name: str, own: Environment) -> None:
        self._name, self._own = name, own

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        shown: dict[int, tuple[tuple[int, ...], Completion]] = {}

        async def watched(context: tuple[int, ...]) -> Completion:
            context = tuple(map(int, context))
            completion = await generate(context)
            shown[id(completion)] = context, completion
            return completion

        try:
            trajectory = await self._own.run(prompt, watched)
        except PacelineError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise self._problem(
                prompt, f"raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
            ) from error
        if not isinstance(trajectory, Trajectory) or not trajectory.turns:
            raise self._problem(
                prompt, f"returned {trajectory!r:.80}; expected a Trajectory with at least one turn"
            )
        tokens: tuple[int, ...] = ()
        for number, turn in enumerate(trajectory.turns, 1):
            tokens += turn.prompt
            context, completion = shown.get(id(turn.completion), ((), None))
            if completion is None or context != tokens:
                wrong = "is not what was generated: generate() must be shown the tokens of all turns so far, and no others"
                raise self._problem(prompt, f"turn {number} {wrong}")
            if not math.isfinite(turn.reward):
                raise self._problem(
                    prompt, f"turn {number} has the reward {turn.reward}; expected a finite number"
                )
            tokens += tuple(completion.tokens.tolist())
        return trajectory

    def _problem(self, prompt: Prompt, what: str) -> RolloutError:
        return RolloutError(f"environment {self._name}, prompt {prompt.uid!r}: {what}")


def open_environment(
    chosen: "str | MakeEnvironment | None", tokenizer: "PreTrainedTokenizerBase"
) -> Environment:
    """The agent loop that "file.py:Class" or a function makes for this tokenizer; without one, a single turn."""
    if chosen is None:
        ends = stop_token_ids(tokenizer)  # not all of which every tokenizer calls special

        def text(tokens: list[int]) -> str:
            return str(
                tokenizer.decode(
                    tokens[:-1] if tokens[-1] in ends else tokens, skip_special_tokens=True
                )
            )

        return SingleTurn(text)
    name = chosen if isinstance(chosen, str) else getattr(chosen, "__qualname__", repr(chosen))
    try:
        make = find_callable(chosen) if isinstance(chosen, str) else chosen
        own = make(tokenizer)
    except PluginError as problem:
        raise ConfigError(f"rollout.environment = {name!r}: {problem}") from None
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"rollout.environment = {name!r}: making it raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        ) from error
    if not inspect.iscoroutinefunction(getattr(own, "run", None)):
        raise ConfigError(
            f"rollout.environment = {name!r} has no method `async def run(self, prompt, generate)`"
        )
    return CustomEnvironment(name, own)
