"""Many conversations with the endpoint at the same time: none is lost, none gets another's text."""

import asyncio
import random
from typing import Any

import aiohttp
import numpy as np
import pytest

from paceline.endpoint.agent import AgentProgram
from paceline.environment.conversation import Limits
from paceline.types import Completion, Finish, Prompt, Sampling, Trajectory
from tests.endpoints import rows_of, tokenizer_of

TURNS = 2


class Engine:
    """Repeats the number of its conversation and counts its turns, after a random time."""

    def __init__(self, number: int, gate: asyncio.Barrier) -> None:
        self.number, self.turn, self.contexts = number, 0, []
        self._tokenizer, self._random, self._gate = tokenizer_of("chatml"), random.Random(1), gate

    async def __call__(self, context: tuple[int, ...], **limits: Any) -> Completion:
        if self.turn == 0:
            await self._gate.wait()  # so that all conversations are open at the same time
        await asyncio.sleep(self._random.random() / 20)
        self.contexts.append(context)
        text = f"{self.number}.{self.turn}"
        self.turn += 1
        end = self._tokenizer.convert_tokens_to_ids("<|im_end|>")
        tokens = np.array([*self._tokenizer.encode(text, add_special_tokens=False), end], np.int32)
        zeros = np.zeros(len(tokens))
        return Completion(tokens, zeros.astype(np.float32), zeros.astype(np.int32), Finish.STOP)


async def with_openai(client: Any, row: dict[str, Any]) -> float:
    async def ask(messages: list[Any]) -> str:
        reply = await client.chat.completions.create(model="policy", messages=messages)
        return str(reply.choices[0].message.content)

    return await converse(row["number"], ask)


def over_http(session: aiohttp.ClientSession) -> Any:
    async def play(env: dict[str, str], row: dict[str, Any]) -> float:
        async def ask(messages: list[Any]) -> str:
            headers = {"Authorization": f"Bearer {env['OPENAI_API_KEY']}"}
            body = {"model": "policy", "messages": messages}
            url = env["OPENAI_BASE_URL"] + "/chat/completions"
            async with session.post(url, json=body, headers=headers) as reply:
                return str((await reply.json())["choices"][0]["message"]["content"])

        return await converse(row["number"], ask)

    return play


async def converse(number: int, ask: Any) -> float:
    messages: list[Any] = [{"role": "user", "content": f"I am {number}"}]
    for turn in range(TURNS):
        text = await ask(messages)
        assert text == f"{number}.{turn}", "this is the reply to another conversation"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    return float(number)


@pytest.mark.parametrize(("kind", "count"), [("openai", 100), ("http", 1000)])
def test_concurrent_conversations_are_neither_lost_nor_mixed_up(kind: str, count: int) -> None:
    async def run() -> list[tuple[Engine, Trajectory]]:
        gate = asyncio.Barrier(count)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            play = with_openai if kind == "openai" else over_http(session)
            tokenizer = tokenizer_of("chatml")
            agent = AgentProgram("agent", play, tokenizer, Sampling(64), Limits(8, 4000, 300.0))
            engines = [Engine(number, gate) for number in range(count)]

            async def one(engine: Engine) -> Trajectory:
                row = {"number": engine.number}
                return await agent.run(Prompt(str(engine.number), (1,), "", row), engine)

            made = await asyncio.gather(*map(one, engines))
            await agent.close()
            return list(zip(engines, made, strict=True))

    for engine, trajectory in asyncio.run(run()):
        assert trajectory.reward == engine.number and engine.turn == TURNS
        (row,) = rows_of(trajectory)
        tokens: tuple[int, ...] = ()
        for turn, context in zip(row, engine.contexts, strict=True):
            tokens += turn.prompt
            assert tokens == context
            tokens += tuple(turn.completion.tokens.tolist())
