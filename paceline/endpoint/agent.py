"""Agent loop of a program that is written with the `openai` package.

The program is a function with any of the parameters `client`, `row` and `env`. It talks to the
model through `client`, an `AsyncOpenAI` for an async function and an `OpenAI` for others, which run
in threads. `env` has the environment variables for programs that it starts. What the function
returns is the reward of the episode.

Waits for: the program, which has the time limit of an episode, and the engines.
"""

import asyncio
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.data.prompts import DataSettings
from paceline.data.rows import use_chat
from paceline.endpoint.request import ChatRequest, RequestError
from paceline.endpoint.server import HOST, MAX_CONNECTIONS, EndpointServer
from paceline.endpoint.session import Chat, Session
from paceline.environment.conversation import Limits
from paceline.environment.protocol import Generate
from paceline.environment.token_stream import Tokens
from paceline.environment.tools import in_thread
from paceline.environment.user_code import is_failure
from paceline.errors import ConfigError, PacelineError, RolloutError, frames_of
from paceline.plugins import Plugin, PluginError, accepted
from paceline.printable import describe_error
from paceline.reward.function import RewardFunctionError, as_optional_reward, is_async
from paceline.types import Completion, Prompt, Sampling, Trajectory, copied_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROUP = "paceline.agents"
PARAMETERS = ("client", "row", "env")


@dataclass(frozen=True, slots=True)
class RunModel:
    """Model of a run, which samples as the settings of the run say."""

    run_generate: Generate
    sampling: Sampling
    max_length: int

    def check(self, request: ChatRequest) -> None:
        """Reject other distributions than that of the run: their log-probs cannot be trained on.

        A greedy run is an evaluation, and has one completion for all settings.
        """
        if self.sampling.temperature == 0:
            return
        for name in ("temperature", "top_p"):
            asked, used = getattr(request, name), getattr(self.sampling, name)
            if asked is not None and asked != used:
                raise RequestError(
                    400,
                    f"{name} = {asked:g}: this run samples with rollout.{name} = {used:g}; leave "
                    f"{name} out, or set rollout.{name} = {asked:g}",
                    name,
                )

    async def generate(self, context: Tokens, request: ChatRequest, choice: int) -> Completion:
        return await self.run_generate(
            context, max_new_tokens=request.max_new_tokens, stop=request.stops
        )


class AgentProgram:
    """Runs the function once per trajectory, each with a separate API key."""

    def __init__(
        self,
        name: str,
        play: Callable[..., Any],
        tokenizer: "PreTrainedTokenizerBase",
        sampling: Sampling,
        limits: Limits,
    ) -> None:
        self._name, self._play = name, play
        self._chat = Chat(tokenizer, limits.max_length)
        self._sampling, self._limits = sampling, limits
        self._parameters = accepted(play, PARAMETERS)
        self._is_async = is_async(play)
        self._server: EndpointServer | None = None
        self._client: Any = None
        self._disconnect: Callable[[], Any] | None = None  # closes the client's connections
        self._starting = asyncio.Lock()

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        server = await self._open()
        model = RunModel(generate, self._sampling, self._limits.max_length)
        session = Session(self._chat, model, self._limits.max_turns)
        key = server.open(session)
        returned = None
        try:
            returned = await self._call(server, key, prompt)
        except PacelineError:
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            # A program may raise because of a limit: that ends the episode and is not its failure.
            if session.failure is None and session.end is None:
                raise self._raised(prompt, error) from error
        finally:
            await server.end(key)
        if session.failure is not None:
            raise session.failure
        reward, details = self._reward(prompt, returned)
        trajectory = session.trajectory(reward, details)
        if trajectory is None:
            why = f" ({session.exceeded})" if session.exceeded else ""
            problem = f"it ended without a completion{why}; expected at least one"
            raise self._problem(prompt, problem)
        return trajectory

    async def close(self) -> None:
        if self._disconnect is not None:
            closing = self._disconnect()
            if self._is_async:
                await closing
        if self._server is not None:
            await self._server.close()

    async def _open(self) -> EndpointServer:
        async with self._starting:
            if self._server is None:
                server = EndpointServer("policy")
                await server.start()
                if "client" in self._parameters:
                    self._client, self._disconnect = _make_client(server.url, self._is_async)
                self._server = server
        return self._server

    async def _call(self, server: EndpointServer, key: str, prompt: Prompt) -> Any:
        available: dict[str, Any] = {
            # Copies share the connections, because opening the client takes long.
            "client": self._client and self._client.with_options(api_key=key),
            "row": copied_row(prompt.row),
            "env": _variables(server.url, key),
        }
        play = partial(self._play, **{name: available[name] for name in self._parameters})
        return await (play() if self._is_async else in_thread(play))

    def _reward(self, prompt: Prompt, returned: Any) -> tuple[float | None, dict[str, float]]:
        try:
            found = as_optional_reward(returned)
        except RewardFunctionError as error:
            raise self._problem(prompt, f"it {error}, or None") from None
        named = dict(found) if isinstance(found, Mapping) else {"reward": found}
        reward = named.pop("reward")
        return reward, {name: float(value) for name, value in named.items() if value is not None}

    def _raised(self, prompt: Prompt, error: BaseException) -> RolloutError:
        frames = frames_of(error)
        code = getattr(inspect.unwrap(self._play), "__code__", None)
        own = [frame for frame in frames if code and frame.filename == code.co_filename]
        frame = (own or frames)[-1]
        where = f"{frame.filename}:{frame.lineno}"
        return self._problem(prompt, f"raised {describe_error(error)} ({where})")

    def _problem(self, prompt: Prompt, what: str) -> RolloutError:
        return RolloutError(f"rollout.agent = {self._name!r}, prompt {prompt.uid!r}: {what}")


def open_program(
    agent: Plugin,
    tokenizer: "PreTrainedTokenizerBase",
    data: DataSettings,
    sampling: Sampling,
    limits: Limits,
) -> AgentProgram:
    """Load the function of rollout.agent. Raises ConfigError if it cannot be used."""
    if not use_chat(data, tokenizer):
        raise ConfigError(
            f"rollout.agent = {agent!r}: a conversation needs a chat template, but data.chat is "
            "false or the tokenizer has none; use an instruction-tuned model"
        )
    try:
        return AgentProgram(str(agent), agent.load(GROUP), tokenizer, sampling, limits)
    except PluginError as problem:
        raise ConfigError(f"rollout.agent = {agent!r}: {problem}") from None


def _make_client(url: str, is_async: bool) -> tuple[Any, Callable[[], Any]]:
    """Return a client, and a function that closes its connections."""
    try:
        import openai
    except ImportError:
        raise ConfigError(
            "rollout.agent: the package openai is not installed, which makes the parameter "
            "'client'; run pip install 'paceline[agents]'"
        ) from None
    # The run limits the time of a generation and of an episode.
    options: dict[str, Any] = {"base_url": url, "api_key": "unset", "timeout": None}
    # Without the proxies of the environment, which do not reach this machine. A program may close
    # its client, for example with `async with`; the connections are those of all episodes.
    http: Any
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(  # these would be 1000, and 100 of them kept
        max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS
    )
    if is_async:
        http = openai.DefaultAsyncHttpxClient(trust_env=False, limits=limits)
        disconnect, http.aclose = http.aclose, _stay_connected
        return openai.AsyncOpenAI(**options, http_client=http), disconnect
    http = openai.DefaultHttpxClient(trust_env=False, limits=limits)
    disconnect, http.close = http.close, lambda: None
    return openai.OpenAI(**options, http_client=http), disconnect


async def _stay_connected() -> None:
    """Ignore that a program closes its client."""


def _variables(url: str, key: str) -> dict[str, str]:
    """Return the variables by which OpenAI clients of other processes find the endpoint."""
    names = ("NO_PROXY", "no_proxy")  # clients read one or the other
    direct = ",".join(filter(None, (*map(os.environ.get, names), HOST)))
    return {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, **dict.fromkeys(names, direct)}
