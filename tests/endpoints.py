"""A fake engine behind the endpoint, episodes of agent programs that use it, and servers."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from paceline.endpoint.agent import AgentProgram
from paceline.environment.conversation import Limits
from paceline.types import Completion, Finish, Prompt, Sampling, Trajectory, Turn
from tests.chat_templates import END, tokenizer_of

LIMITS = Limits(max_turns=64, max_length=20_000, timeout_s=30.0)
PROMPT = Prompt("q", (1,), "", {"prompt": "What is it?"})
USER = {"role": "user", "content": "What is it?"}


class Engine:
    """Returns the given texts, then random tokens; records each context with its completion."""

    def __init__(self, *texts: str, template: str = "chatml", seed: int = 0) -> None:
        self.tokenizer = tokenizer_of(template)
        self.texts = list(texts)
        self.seen: list[tuple[tuple[int, ...], Completion]] = []
        self.asked: list[dict[str, Any]] = []
        self.cancelled = 0
        self.hold: asyncio.Event | None = None
        self.holding = asyncio.Event()
        self._random = random.Random(seed)
        self._end = self.tokenizer.convert_tokens_to_ids(END.get(template, "<|im_end|>"))

    async def __call__(self, context: tuple[int, ...], **limits: Any) -> Completion:
        self.asked.append(limits)
        if self.hold is not None:
            self.holding.set()
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        completion = self._complete(limits.get("max_new_tokens"), limits.get("stop", ()))
        self.seen.append((context, completion))
        return completion

    def _complete(self, length: int | None, stop: tuple[str, ...]) -> Completion:
        tokens = [*self._text(), self._end]
        finish = Finish.STOP
        for count in range(len(tokens)):
            if any(each in self.tokenizer.decode(tokens[:count]) for each in stop):
                tokens = tokens[:count]
                break
        if length is not None and length < len(tokens):
            tokens, finish = tokens[:length], Finish.LENGTH
        count = len(tokens)
        logprobs = np.linspace(-1, -2, count, dtype=np.float32)
        return Completion(np.array(tokens, np.int32), logprobs, np.zeros(count, np.int32), finish)

    def _text(self) -> list[int]:
        if self.texts:
            return list(self.tokenizer.encode(self.texts.pop(0), add_special_tokens=False))
        # Single letters and words: rarely the tokens that the tokenizer makes of their text.
        words = self.tokenizer.encode("the answer is 42? ok", add_special_tokens=False)
        letters = [
            self.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in " theansw42?"
        ]
        count = self._random.randint(1, 12)
        return [self._random.choice([*words, *letters]) for _ in range(count)]


def program(
    play: Callable[..., Any],
    engine: Engine,
    limits: Limits = LIMITS,
    sampling: Sampling | None = None,
) -> AgentProgram:
    return AgentProgram("agent", play, engine.tokenizer, sampling or Sampling(64), limits)


def episode(play: Callable[..., Any], engine: Engine, **options: Any) -> Trajectory:
    """Run one episode of a program."""

    async def run() -> Trajectory:
        agent = program(play, engine, **options)
        try:
            return await agent.run(PROMPT, engine)
        finally:
            await agent.close()

    return asyncio.run(run())


async def ask(client: Any, messages: list[Any], **options: Any) -> Any:
    """Ask for a chat completion with the client of `openai`."""
    return await client.chat.completions.create(model="policy", messages=messages, **options)


async def post(
    env: dict[str, str], body: bytes, path: str = "/chat/completions"
) -> tuple[int, Any]:
    """Send a body as a plain client does; return the status and the JSON of the reply."""
    headers = {"Authorization": f"Bearer {env['OPENAI_API_KEY']}"}
    url = env["OPENAI_BASE_URL"] + path
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(url, data=body) as reply,
    ):
        return reply.status, await reply.json()


def rows_of(trajectory: Trajectory) -> list[list[Turn]]:
    rows: list[list[Turn]] = []
    for turn in trajectory.turns:
        if turn.restarts or not rows:
            rows.append([])
        rows[-1].append(turn)
    return rows


def assert_exact(trajectory: Trajectory, engine: Engine) -> None:
    """Check that every completion is in one row, behind exactly the tokens that the model saw."""
    contexts = {id(completion): context for context, completion in engine.seen}
    assert len(trajectory.turns) == len(contexts)
    for row in rows_of(trajectory):
        tokens: tuple[int, ...] = ()
        for turn in row:
            tokens += turn.prompt
            assert contexts.pop(id(turn.completion)) == tokens
            tokens += tuple(turn.completion.tokens.tolist())
    assert not contexts, "completions are missing"


@asynccontextmanager
async def served(reply: Callable[[Any], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """Run a server that answers every request with `reply`."""

    async def handle(request: web.BaseRequest) -> web.Response:
        return await reply(request)

    runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def said(text: str) -> web.Response:
    return web.json_response({"choices": [{"message": {"content": text}}]})
