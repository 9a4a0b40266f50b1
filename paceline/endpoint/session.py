"""Session of one API key: turns its requests into generations and keeps what was generated.

Waits for: the engines. In a run, an error of the engines fails the whole session, because the
program may not notice that a completion is missing.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from paceline.data.chat import stop_token_ids
from paceline.endpoint.branches import Branch, Branches, Start
from paceline.endpoint.request import ChatMessage, ChatRequest, RequestError
from paceline.environment.token_stream import ChatTemplate, Tokens
from paceline.environment.tool_calls import TAGGED, parse_tool_calls
from paceline.errors import PacelineError, first_error
from paceline.types import Completion, End, Finish, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
TEMPLATES = 64  # lists of tools whose templates are kept


class Model(Protocol):
    """What a session generates with."""

    @property
    def max_length(self) -> int:
        """Tokens of a context and its completion."""
        ...

    def check(self, request: ChatRequest) -> None:
        """Raise RequestError for sampling settings that it does not have."""
        ...

    async def generate(self, context: Tokens, request: ChatRequest, choice: int) -> Completion: ...


class Chat:
    """The tokenizer of the model, with a chat template per list of tools."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", max_tokens: int | None = None) -> None:
        """`max_tokens`: of a conversation, see ChatTemplate."""
        self.tokenizer, self._max_tokens = tokenizer, max_tokens
        self._ends = frozenset(stop_token_ids(tokenizer))
        self._template = lru_cache(TEMPLATES)(self._make)

    def template(self, request: ChatRequest) -> ChatTemplate:
        return self._template(json.dumps(request.tool_schemas))

    def token_text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def ends(self, completion: Completion) -> bool:
        """Return whether the model ended the completion itself."""
        return bool(len(completion)) and int(completion.tokens[-1]) in self._ends

    def _make(self, tools: str) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, json.loads(tools), self._max_tokens)


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion as the client gets it."""

    message: ChatMessage
    finish_reason: str
    completion: Completion
    branch: Branch


class Session:
    def __init__(
        self, chat: Chat, model: Model, max_completions: int | None = None, keep: bool = True
    ) -> None:
        """`keep`: later requests continue the completions, which `trajectory` returns."""
        self.chat, self._model = chat, model
        self._left, self._keep = max_completions, keep
        self._branches = Branches()
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.failure: PacelineError | None = None
        self.end: End | None = None  # the limit that a request exceeded
        self.exceeded = ""  # what the request was told
        self._recovered = False  # a later request did not exceed it

    async def complete(self, request: ChatRequest) -> tuple[Start, list[Choice]]:
        """Generate the completions of a request. Raises RequestError."""
        if self._closed:  # while the body of the request arrived
            raise _ended()
        self._model.check(request)
        start = self._start(request)
        self._take_turns(request)
        completions = await self._own(self._generate(start, request))
        self._recovered = self.end is not None
        choices = [self._choice(start, request, completion) for completion in completions]
        return start, choices

    def discard(self, choices: list[Choice]) -> None:
        """Forget completions that the client did not get."""
        for choice in choices if self._keep else ():
            self._branches.remove(choice.branch)

    def trajectory(self, reward: float | None, details: dict[str, float]) -> Trajectory | None:
        """Return everything that was generated; None if that is nothing."""
        turns = self._branches.turns()
        if not turns:
            return None
        limited = self.end is not None and (reward is None or not self._recovered)
        end = self.end if limited else End.DONE
        return Trajectory(turns, self._branches.text, reward, details, end)

    async def close(self) -> None:
        """Abort the requests that are still in progress, and reject later ones."""
        self._closed = True
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _start(self, request: ChatRequest) -> Start:
        try:
            start = self._branches.find(request, self.chat.template(request))
        except Exception as error:  # templates reject some orders of messages
            raise RequestError(400, f"messages: the chat template: {error}", "messages") from error
        if len(start.context) >= self._model.max_length:
            limit = self._model.max_length  # the end of a very long text is not counted
            found = f"{len(start.context)} or more tokens; expected fewer than {limit}"
            raise self._ended_by(
                End.CONTEXT, f"messages: {found}", "messages", "context_length_exceeded"
            )
        return start

    def _take_turns(self, request: ChatRequest) -> None:
        if self._left is None:
            return
        if request.choices > self._left:
            problem = "the episode has requested rollout.max_turns completions"
            raise self._ended_by(End.TURNS, problem, None, "max_turns")
        self._left -= request.choices

    def _ended_by(self, end: End, problem: str, param: str | None, code: str) -> RequestError:
        """Return the error of a request that exceeds a limit of the episode."""
        self.end, self.exceeded, self._recovered = end, problem, False
        return RequestError(400, problem, param, code)

    async def _own(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that `close` cancels without cancelling the caller."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
        if task.cancelled():
            raise _ended()
        return task.result()

    async def _generate(self, start: Start, request: ChatRequest) -> list[Completion]:
        error: BaseException | None = self.failure
        if error is None:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._model.generate(start.context, request, number))
                        for number in range(request.choices)
                    ]
                return [task.result() for task in tasks]
            except BaseExceptionGroup as failed:
                error = first_error(failed)
        if not isinstance(error, PacelineError):
            raise error
        if self._keep:
            self.failure = error
        raise RequestError(500, f"the completion failed: {error}", code="failed")

    def _choice(self, start: Start, request: ChatRequest, completion: Completion) -> Choice:
        sampled = tuple(completion.tokens.tolist())
        text = self.chat.template(request).text(sampled)
        shown = text
        if completion.finish is Finish.STOP and not self.chat.ends(completion):
            shown = _before_stop(text, request.stops)
        calls = []
        if request.reads_calls:
            calls = parse_tool_calls(shown, self.chat.tokenizer, request.tool_schemas)
        if any(call.problem for call in calls):
            calls = []  # the client gets the text, as there is no call that it could run
        content = TAGGED.sub("", shown).strip() if "<tool_call>" in shown else ""
        message = ChatMessage.model_validate(
            {
                "role": "assistant",
                "content": (content or None) if calls else shown,
                "tool_calls": [
                    {
                        "id": f"call_{secrets.token_hex(12)}",
                        "function": {
                            "name": call.name,
                            "arguments": json.dumps(call.arguments),
                        },
                    }
                    for call in calls
                ]
                or None,
            }
        )
        reason = "length" if completion.finish is Finish.LENGTH else "stop"
        if self._keep:
            branch = self._branches.add(start, completion, text, message)
        else:
            branch = Branch(start, completion, text, b"")
        return Choice(message, "tool_calls" if calls else reason, completion, branch)


def _ended() -> RequestError:
    return RequestError(401, "the episode has ended", code="invalid_api_key")


def _before_stop(text: str, stops: tuple[str, ...]) -> str:
    """Return the text before a stop string, which the tokens of the completion include."""
    return re.split("|".join(map(re.escape, stops)), text, maxsplit=1)[0] if stops else text
