"""Agent loop of a conversation: the model and an environment speak alternately until one ends it.

Waits for: the engines, and the environment (at most `timeout_s` per call). An episode ends when the
environment says so, when a completion or the whole context reaches its maximum length, or after
`max_turns`. The reason is part of the trajectory. An environment that fails or hangs fails the
trajectory instead. A turn restarts where the chat template rewrites what the model has seen.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.data.chat import message_problem
from paceline.environment.pool import EnvironmentPool
from paceline.environment.protocol import (
    Environment,
    EnvironmentFailure,
    Message,
    Reply,
    first_messages,
)
from paceline.environment.token_stream import ChatTemplate, Tokens
from paceline.environment.user_code import is_failure, line_of
from paceline.errors import PacelineError, RolloutError
from paceline.printable import describe_error
from paceline.types import (
    MAX_REWARD,
    Completion,
    End,
    Finish,
    Prompt,
    Trajectory,
    Turn,
    copied_row,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
Generate = Callable[[Tokens], Awaitable[Completion]]
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an episode."""

    max_turns: int
    max_length: int  # tokens of all turns
    timeout_s: float  # of a call of the environment; infinite if its worker has the deadline


class Conversation:
    """Runs one episode per trajectory, each with a new environment."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Environment],
        template: ChatTemplate,
        messages: Callable[[Prompt], Sequence[Message]],
        limits: Limits,
        pool: EnvironmentPool | None = None,
    ) -> None:
        """`messages` returns the chat messages of a prompt; `pool` runs what `make` makes."""
        self._name, self._make, self._template = name, make, template
        self._messages, self._limits = messages, limits
        self.pool = pool

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        try:
            environment = self._make()
        except (Exception, SystemExit) as error:
            raise self._raised(prompt, "creating it", error) from error
        try:
            first = await self._call(prompt, "reset", lambda: _reset(environment, prompt))
            messages = list(self._messages(prompt)) if first is None else first
            self._check(prompt, "reset", messages)
            return await self._play(prompt, environment, messages, generate)
        finally:
            await self._close(prompt, environment)

    async def _play(
        self,
        prompt: Prompt,
        environment: Environment,
        history: list[Message],
        generate: Generate,
    ) -> Trajectory:
        turns: list[Turn] = []
        context = new = self._tokens(prompt, self._template.start, history)
        text, end, restarts = "", End.CONTEXT, False
        while len(context) < self._limits.max_length:
            completion = await generate(context)
            sampled = tuple(completion.tokens.tolist())
            text = self._template.text(sampled)
            if completion.finish is Finish.LENGTH:
                turns.append(Turn(new, completion, restarts=restarts))
                if len(context) + len(sampled) < self._limits.max_length:
                    end = End.LENGTH
                break
            said = {"role": "assistant", "content": text}
            reply = await self._step(prompt, environment, said)
            turns.append(Turn(new, completion, reply.reward, restarts))
            if reply.done or len(turns) == self._limits.max_turns:
                end = End.DONE if reply.done else End.TURNS
                break
            between = self._tokens(
                prompt, self._template.between, history, said, sampled, _messages(reply)
            )
            history += [said, *_messages(reply)]
            restarts = between is None
            start = self._template.start
            new = self._tokens(prompt, start, history) if between is None else between
            context = new if restarts else context + sampled + new
        if not turns:
            raise self._problem(
                prompt,
                f"its first messages have {len(context)} or more tokens; expected fewer than "
                "data.max_prompt_length + rollout.max_response_length = "
                f"{self._limits.max_length}",
            )
        return Trajectory(tuple(turns), text, end=end)

    def _tokens(self, prompt: Prompt, work: Callable[..., T], *args: Any) -> T:
        """Render messages. Templates raise for roles and orders that their model does not know."""
        try:
            return work(*args)
        except Exception as error:
            raise self._raised(prompt, "the chat template", error) from error

    async def _step(self, prompt: Prompt, environment: Environment, said: Message) -> Reply:
        reply = await self._call(prompt, "step", lambda: environment.step(said))
        if not isinstance(reply, Reply):
            raise self._problem(prompt, f"step() returned {reply!r:.80}; expected a Reply")
        if not abs(reply.reward) <= MAX_REWARD:
            raise self._problem(
                prompt,
                f"step() returned the reward {reply.reward!r:.80}; expected a finite number of at "
                f"most {MAX_REWARD:g}",
            )
        if not reply.done:
            self._check(prompt, "step", _messages(reply))
        return reply

    def _check(self, prompt: Prompt, method: str, messages: Sequence[Message]) -> None:
        if problem := message_problem(messages):
            raise self._problem(prompt, f"{method}() returned messages that are wrong: {problem}")

    async def _call(self, prompt: Prompt, method: str, call: Callable[[], Awaitable[T]]) -> T:
        limit = self._limits.timeout_s
        try:
            async with asyncio.timeout(limit) as deadline:
                return await call()
        except PacelineError:
            raise
        except EnvironmentFailure as error:
            raise self._problem(prompt, str(error)) from None
        except TimeoutError as error:
            if not deadline.expired():
                raise self._raised(prompt, f"{method}()", error) from error
            raise self._problem(
                prompt,
                f"{method}() took longer than rollout.environment_timeout_s = {limit:g} s",
            ) from None
        except BaseException as error:
            if not is_failure(error):
                raise
            raise self._raised(prompt, f"{method}()", error) from error

    async def _close(self, prompt: Prompt, environment: Environment) -> None:
        """Close the environment, also if the episode was cancelled. Failures are only logged."""
        closing = asyncio.ensure_future(_closed(environment))
        try:
            await asyncio.shield(asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S))
        finally:
            if closing.done() and not closing.cancelled() and (error := closing.result()):
                log.warning("%s", self._raised(prompt, "close()", error))

    def _raised(self, prompt: Prompt, what: str, error: BaseException) -> RolloutError:
        return self._problem(prompt, f"{what} raised {describe_error(error)} ({line_of(error)})")

    def _problem(self, prompt: Prompt, what: str) -> RolloutError:
        return RolloutError(f"environment {self._name}, prompt {prompt.uid!r}: {what}")


async def _reset(environment: Environment, prompt: Prompt) -> list[Message] | None:
    return first_messages(await environment.reset(copied_row(prompt.row)))


async def _closed(environment: Environment) -> BaseException | None:
    """Close the environment. Return what it raised: a task with SystemExit would end the run."""
    if close := getattr(environment, "close", None):  # an environment without resources has none
        try:
            await close()
        except BaseException as error:
            if not is_failure(error):
                raise
            return error
    return None


def _messages(reply: Reply) -> list[dict[str, Any]]:
    if isinstance(reply.messages, str):
        return [{"role": "user", "content": reply.messages}]
    return [dict(m) if isinstance(m, Mapping) else m for m in reply.messages]
