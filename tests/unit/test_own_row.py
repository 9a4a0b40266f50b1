"""User code that changes its row changes nothing for other completions and later epochs."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from paceline.environment.conversation import Limits
from paceline.environment.protocol import Reply
from paceline.reward.reward import RewardSettings, open_reward
from paceline.rollout.environment import open_environment
from paceline.types import Prompt, Trajectory, Turn, copied_row
from tests.endpoints import Engine, ask, program
from tests.episodes import DATA, Model

MESSAGES = [{"role": "user", "content": "What is it?"}]


def prompt() -> Prompt:
    return Prompt("q", (1,), "", {"prompt": [dict(MESSAGES[0])], "nested": {"notes": []}})


async def talk(client: Any, row: dict[str, Any]) -> float:
    messages = row["prompt"]
    reply = await ask(client, messages)
    messages += [reply.choices[0].message, {"role": "user", "content": "again"}]
    await ask(client, messages)
    return 1.0


class Appending:
    async def reset(self, row: Mapping[str, Any]) -> Any:
        row["prompt"].append({"role": "user", "content": "more"})
        return row["prompt"]

    async def step(self, message: Mapping[str, Any]) -> Reply:
        return Reply(done=True)


class Loop:
    def __init__(self, tokenizer: Any) -> None: ...

    async def run(self, prompt: Prompt, generate: Any) -> Trajectory:
        prompt.row["nested"]["notes"].append("seen")
        return Trajectory((Turn((1,), await generate((1,))),), "", reward=0.0)


def run_program(given: Prompt) -> None:
    async def run() -> None:
        agent, engine = program(talk, Engine()), Engine()
        await agent.run(given, engine)
        await agent.close()

    asyncio.run(run())


def run_environment(make: Any, given: Prompt) -> None:
    model = Model("yes")
    loop = open_environment(make, model.tokenizer, DATA, Limits(6, 4000, 60.0))
    asyncio.run(loop.run(given, model.generate))


def run_reward(given: Prompt) -> None:
    def score(completion: str, row: dict[str, Any]) -> float:
        row["nested"]["notes"].append(completion)
        return float(len(row["nested"]["notes"]))

    async def run() -> None:
        reward = await open_reward(RewardSettings(), None, score)
        texts = [Trajectory((), text) for text in "abc"]
        assert list(await reward.score(given, texts)) == [1.0, 1.0, 1.0]
        await reward.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "work",
    [run_program, partial(run_environment, Appending), partial(run_environment, Loop), run_reward],
    ids=["program", "environment", "agent loop", "reward"],
)
def test_row_stays_as_it_is_when_user_code_appends_to_it(work: Any) -> None:
    given = prompt()
    work(given)
    assert given == prompt()


def test_copied_row_keeps_objects_with_methods_of_their_own() -> None:
    counts: defaultdict[str, int] = defaultdict(int)
    copy = copied_row({"nested": [{"counts": counts}]})
    assert copy["nested"][0]["counts"] is counts
