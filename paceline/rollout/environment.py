"""Agent loop: turns a prompt into one trajectory, or one per agent, with calls of `generate`.

It does not depend on engines, weights or batches. `rollout.environment` is the name of a built-in
environment or adapter (environment/lookup.py), or "file.py:E": an environment, a class `E()` with
methods `reset` and `step` (environment/), or a custom agent loop, a class `E(tokenizer)` with a
method `run`.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from paceline.data.chat import conversation, stop_token_ids, text_decoder
from paceline.data.prompts import DataSettings
from paceline.data.rows import use_chat
from paceline.environment.conversation import Conversation, Limits
from paceline.environment.lookup import locate
from paceline.environment.pool import EnvironmentPool
from paceline.environment.protocol import Environment, missing_method
from paceline.environment.protocol import Generate as Generate
from paceline.environment.token_stream import ChatTemplate
from paceline.environment.tool_use import ToolUse
from paceline.environment.tools import Tool, Toolbox
from paceline.environment.user_code import is_failure, line_of
from paceline.errors import ConfigError, PacelineError, RolloutError, first_error
from paceline.plugins import PluginError
from paceline.printable import describe_error
from paceline.types import MAX_REWARD, Completion, Prompt, Trajectory, Turn, copied_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AgentLoop(Protocol):
    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory | tuple[Trajectory, ...]:
        """Generate one trajectory, or several of agents that act in one episode.

        Raises RolloutError if the episode cannot be finished.
        """
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

    A trajectory must consist of exactly the tokens that the model was given and generated, and no
    completion is trained on twice.
    """

    def __init__(self, name: str, environment: AgentLoop) -> None:
        self._name, self._environment = name, environment
        self.gives_rewards = bool(getattr(environment, "gives_rewards", False))

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory | tuple[Trajectory, ...]:
        generated: dict[int, tuple[tuple[int, ...], Completion]] = {}

        async def recorded(
            context: tuple[int, ...],
            /,
            *,
            max_new_tokens: int | None = None,
            stop: tuple[str, ...] = (),
        ) -> Completion:
            context = tuple(map(int, context))
            # Without limits, a plain function of the context is enough.
            limits: Any = {"max_new_tokens": max_new_tokens, "stop": stop}
            given = limits if max_new_tokens is not None or stop else {}
            completion = await generate(context, **given)
            generated[id(completion)] = context, completion
            return completion

        try:
            given = replace(prompt, row=copied_row(prompt.row))
            result = await self._environment.run(given, recorded)
        except PacelineError:
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            cause = first_error(error)
            if isinstance(cause, PacelineError):  # of generate(), called in a task group
                raise cause from error
            raise self._problem(
                prompt, f"raised {describe_error(error)} ({line_of(error)})"
            ) from error
        trajectories = result if isinstance(result, tuple) else (result,)
        for trajectory in trajectories:
            if not isinstance(trajectory, Trajectory) or not trajectory.turns:
                raise self._problem(
                    prompt,
                    f"returned {trajectory!r:.80}; expected a Trajectory with at least one turn",
                )
            self._check(prompt, trajectory, generated)
        if not trajectories:
            raise self._problem(prompt, "returned no Trajectory; expected at least one")
        return result

    def _check(
        self,
        prompt: Prompt,
        trajectory: Trajectory,
        generated: dict[int, tuple[tuple[int, ...], Completion]],
    ) -> None:
        """Raise RolloutError for a turn that is not a call of generate(), which it uses up."""
        tokens: tuple[int, ...] = ()
        who = f"agent {trajectory.agent!r}, " if trajectory.agent else ""
        for number, turn in enumerate(trajectory.turns, 1):
            tokens = turn.prompt if turn.restarts else tokens + turn.prompt
            context, completion = generated.pop(id(turn.completion), ((), None))
            if completion is None or context != tokens:
                expected = (
                    "the prompt of a turn that restarts is all that generate() got"
                    if turn.restarts
                    else "pass generate() the tokens of all turns so far, and no others"
                )
                raise self._problem(
                    prompt, f"{who}turn {number} does not match a call of generate(); {expected}"
                )
            if not abs(turn.reward) <= MAX_REWARD:
                raise self._problem(
                    prompt,
                    f"{who}turn {number} has the reward {turn.reward}; expected a finite number of "
                    f"at most {MAX_REWARD:g}",
                )
            tokens += tuple(completion.tokens.tolist())

    def _problem(self, prompt: Prompt, what: str) -> RolloutError:
        return RolloutError(f"environment {self._name}, prompt {prompt.uid!r}: {what}")


def gives_rewards(agent: AgentLoop) -> bool:
    """Return whether an agent loop scores its turns itself, so that no other reward is needed."""
    return isinstance(agent, Conversation) or bool(getattr(agent, "gives_rewards", False))


def open_environment(
    chosen: "str | MakeEnvironment | None",
    tokenizer: "PreTrainedTokenizerBase",
    data: DataSettings,
    limits: Limits,
    tools: Sequence[str | Tool] = (),
    arguments: Mapping[str, Any] | None = None,
    workers: int = 0,
    pass_env: Sequence[str] = (),
) -> AgentLoop:
    """Create the agent loop from a name, "file.py:Class" or a callable; default: a single turn.

    `arguments` are those of the class. With `tools`, the model calls them until it writes a message
    without a call. With `workers`, environment or tools run in processes; the caller starts and
    closes the pool of the agent loop.
    """
    pool = _pool(chosen, arguments, tools, workers, limits, pass_env) if workers else None
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
        make: Any = chosen
        given = dict(arguments or {})
        if isinstance(chosen, str):
            located = locate(chosen, arguments)
            make, given = located.load(), dict(located.arguments)
        if hasattr(make, "step"):
            return _conversation(name, make, given, tokenizer, data, limits)
        if "limits" in inspect.signature(make).parameters:
            given["limits"] = limits
        environment = make(tokenizer, **given)
    except PluginError as problem:
        raise ConfigError(f"rollout.environment = {name!r}: {problem}") from None
    except PacelineError:
        raise
    except Exception as error:
        raise ConfigError(
            f"rollout.environment = {name!r}: creating it raised {describe_error(error)} "
            f"({line_of(error)})"
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
    tools: Sequence[str | Tool],
    pool: EnvironmentPool | None,
) -> Conversation:
    if chosen is not None:
        raise ConfigError(
            f"rollout.tools = {list(tools)} contradicts rollout.environment, which runs its tools "
            "itself; remove one of them"
        )
    toolbox = Toolbox(tools)
    make = partial(ToolUse, pool or toolbox, toolbox.schemas, tokenizer)
    names = ", ".join(schema["function"]["name"] for schema in toolbox.schemas)
    return _chat(f"tools {names}", make, tokenizer, data, limits, toolbox.schemas, pool)


def _pool(
    chosen: "str | MakeEnvironment | None",
    arguments: Mapping[str, Any] | None,
    tools: Sequence[str | Tool],
    workers: int,
    limits: Limits,
    pass_env: Sequence[str],
) -> EnvironmentPool:
    if tools and all(isinstance(tool, str) for tool in tools):
        names = tuple(map(str, tools))
        return EnvironmentPool("tools", names, workers, limits.timeout_s, pass_env)
    if not tools and isinstance(chosen, str):
        code = locate(chosen, arguments)
        return EnvironmentPool("environment", (chosen,), workers, limits.timeout_s, pass_env, code)
    given = "a class or function that the program passes" if chosen or tools else "no environment"
    raise ConfigError(
        f"rollout.environment_workers = {workers} needs rollout.tools, or rollout.environment "
        f"as 'file.py:Class', but there is {given}; set it, or remove environment_workers"
    )


def _conversation(
    name: str,
    make: Any,
    arguments: Mapping[str, Any],
    tokenizer: "PreTrainedTokenizerBase",
    data: DataSettings,
    limits: Limits,
) -> Conversation:
    if method := missing_method(make):
        raise ConfigError(
            f"rollout.environment = {name!r} has no method `async def {method}`; expected "
            "reset(self, row), step(self, message) and optionally close(self)"
        )
    episode = partial(make, **arguments) if arguments else make
    if not (tools := getattr(make, "tools", ())):
        return _chat(name, episode, tokenizer, data, limits)
    toolbox = Toolbox(tools)
    return _chat(
        name,
        lambda: ToolUse(toolbox, toolbox.schemas, tokenizer, episode()),
        tokenizer,
        data,
        limits,
        toolbox.schemas,
    )


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
    template = ChatTemplate(tokenizer, schemas, limits.max_length)
    return Conversation(name, make, template, messages, limits, pool)
