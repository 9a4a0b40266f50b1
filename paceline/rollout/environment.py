"""Agent loop: turns a prompt into one trajectory with calls of `generate`.

It does not depend on engines, weights or batches. `rollout.environment = "file.py:E"` selects an
environment, a class `E()` with methods `reset` and `step` (environment/), or a custom agent loop, a
class `E(tokenizer)` with a method `run`.
"""

import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from paceline.data.chat import conversation, stop_token_ids, text_decoder
from paceline.data.prompts import DataSettings
from paceline.data.rows import use_chat
from paceline.environment.conversation import Conversation, Limits
from paceline.environment.pool import EnvironmentPool
from paceline.environment.protocol import Environment
from paceline.environment.token_stream import ChatTemplate
from paceline.environment.tool_use import ToolUse
from paceline.environment.tools import Toolbox
from paceline.errors import ConfigError, PacelineError, RolloutError
from paceline.plugins import PluginError, find_callable
from paceline.types import MAX_REWARD, Completion, Prompt, Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Generate = Callable[[tuple[int, ...]], Awaitable[Completion]]
"""Maps context tokens to a completion. The caller does not see interruptions by weight syncs."""


class AgentLoop(Protocol):
    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Generate one trajectory. Raises RolloutError if it cannot be finished."""
        ...


MakeEnvironment = Callable[["PreTrainedTokenizerBase"], AgentLoop] | type[Environment]


class SingleTurn:
    """Default agent loop: one prompt, one completion."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        completion = await generate(prompt.tokens)
        return Trajectory(
            turns=(Turn(prompt.tokens, completion),), text=self._decode(completion.tokens.tolist())
        )


class CustomEnvironment:
    """User's agent loop. Its failures become RolloutErrors, and its trajectories are checked.

    A trajectory must consist of exactly the tokens that the model was given and generated.
    """

    def __init__(self, name: str, environment: AgentLoop) -> None:
        self._name, self._environment = name, environment

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        generated: dict[int, tuple[tuple[int, ...], Completion]] = {}

        async def recorded(context: tuple[int, ...]) -> Completion:
            context = tuple(map(int, context))
            completion = await generate(context)
            generated[id(completion)] = context, completion
            return completion

        try:
            trajectory = await self._environment.run(prompt, recorded)
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
            context, completion = generated.get(id(turn.completion), ((), None))
            if completion is None or context != tokens:
                raise self._problem(
                    prompt,
                    f"turn {number} does not match a call of generate(); "
                    "pass generate() the tokens of all turns so far, and no others",
                )
            if not abs(turn.reward) <= MAX_REWARD:
                raise self._problem(
                    prompt,
                    f"turn {number} has the reward {turn.reward}; expected a finite number of at "
                    f"most {MAX_REWARD:g}",
                )
            tokens += tuple(completion.tokens.tolist())
        return trajectory

    def _problem(self, prompt: Prompt, what: str) -> RolloutError:
        return RolloutError(f"environment {self._name}, prompt {prompt.uid!r}: {what}")


def open_environment(
    chosen: "str | MakeEnvironment | None",
    tokenizer: "PreTrainedTokenizerBase",
    data: DataSettings,
    limits: Limits,
    tools: Sequence[str] = (),
    workers: int = 0,
    pass_env: Sequence[str] = (),
) -> AgentLoop:
    """Create the agent loop from "file.py:Class" or a callable; without one, a single turn.

    With `tools`, the model calls them until it writes a message without a call. With `workers`,
    environment or tools run in processes; the caller starts and closes the pool of the agent loop.
    """
    pool = _pool(chosen, tools, workers, limits, pass_env) if workers else None
    if tools:
        return _with_tools(chosen, tokenizer, data, limits, tools, pool)
    if pool:
        return _chat(pool.name, pool.environment, tokenizer, data, limits, pool=pool)
    if chosen is None:
        ends = stop_token_ids(tokenizer)  # some tokenizers do not mark all of them as special
        decode = text_decoder(tokenizer)

        def text(tokens: list[int]) -> str:
            tokens = tokens[:-1] if tokens[-1] in ends else tokens
            return decode(tokens)

        return SingleTurn(text)
    name = chosen if isinstance(chosen, str) else getattr(chosen, "__qualname__", repr(chosen))
    try:
        make = find_callable(chosen) if isinstance(chosen, str) else chosen
        if hasattr(make, "step"):
            return _conversation(name, make, tokenizer, data, limits)
        environment = make(tokenizer)
    except PluginError as problem:
        raise ConfigError(f"rollout.environment = {name!r}: {problem}") from None
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"rollout.environment = {name!r}: creating it raised {type(error).__name__}: {error} "
            f"({frame.filename}:{frame.lineno})"
        ) from error
    if not inspect.iscoroutinefunction(getattr(environment, "run", None)):
        raise ConfigError(
            f"rollout.environment = {name!r} has neither `async def step(self, message)` nor "
            "`async def run(self, prompt, generate)`"
        )
    return CustomEnvironment(name, environment)


def _with_tools(
    chosen: "str | MakeEnvironment | None",
    tokenizer: "PreTrainedTokenizerBase",
    data: DataSettings,
    limits: Limits,
    tools: Sequence[str],
    pool: EnvironmentPool | None,
) -> Conversation:
    if chosen is not None:
        raise ConfigError(
            f"rollout.tools = {list(tools)} contradicts rollout.environment, which runs its tools "
            "itself; remove one of them"
        )
    toolbox = Toolbox(tools)
    make = partial(ToolUse, pool or toolbox, tokenizer)
    name = f"tools {', '.join(tools)}"
    return _chat(name, make, tokenizer, data, limits, toolbox.schemas, pool)


def _pool(
    chosen: "str | MakeEnvironment | None",
    tools: Sequence[str],
    workers: int,
    limits: Limits,
    pass_env: Sequence[str],
) -> EnvironmentPool:
    if not tools and not isinstance(chosen, str):
        given = "a class that the program passes" if chosen else "no environment"
        raise ConfigError(
            f"rollout.environment_workers = {workers} needs rollout.tools, or rollout.environment "
            f"as 'file.py:Class', but there is {given}; set it, or remove environment_workers"
        )
    names = tuple(tools) or (str(chosen),)
    kind = "tools" if tools else "environment"
    return EnvironmentPool(kind, names, workers, limits.timeout_s, pass_env)


def _conversation(
    name: str,
    make: Any,
    tokenizer: "PreTrainedTokenizerBase",
    data: DataSettings,
    limits: Limits,
) -> Conversation:
    for method in ("reset", "step"):
        if not inspect.iscoroutinefunction(getattr(make, method, None)):
            raise ConfigError(
                f"rollout.environment = {name!r} has no method `async def {method}`; expected "
                "reset(self, row) and step(self, message)"
            )
    return _chat(name, make, tokenizer, data, limits)


def _chat(
    name: str,
    make: Callable[[], Environment],
    tokenizer: "PreTrainedTokenizerBase",
    data: DataSettings,
    limits: Limits,
    schemas: Sequence[dict[str, Any]] = (),
    pool: EnvironmentPool | None = None,
) -> Conversation:
    if not use_chat(data, tokenizer):
        raise ConfigError(
            f"environment {name!r}: a conversation needs a chat template, but data.chat is false "
            "or the tokenizer has none; use an instruction-tuned model, or an agent loop with "
            "`async def run(self, prompt, generate)`"
        )

    def messages(prompt: Prompt) -> list[dict[str, Any]]:
        return conversation(prompt.row[data.prompt_key], data.system)

    if pool:  # its deadlines start when a worker starts on a call
        limits = replace(limits, timeout_s=math.inf)
    return Conversation(name, make, ChatTemplate(tokenizer, schemas), messages, limits, pool)
