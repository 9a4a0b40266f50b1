"""Agent programs behind the endpoint: their keys, clients, limits, failures and results."""

import asyncio
import json
import os
import resource
import subprocess
import sys
from typing import Any
from urllib.request import proxy_bypass_environment

import openai
import pytest

from paceline.endpoint.server import MAX_CONNECTIONS
from paceline.environment.conversation import Limits
from paceline.errors import RolloutError
from paceline.types import End, Sampling
from tests.endpoints import PROMPT, USER, Engine, ask, assert_exact, episode, post, program


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_other_processes_reach_endpoint_without_proxy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "example.org")

    async def play(client: Any, env: dict[str, str]) -> None:
        await ask(client, [USER])
        for variable, value in env.items():
            monkeypatch.setenv(variable, value)
        assert proxy_bypass_environment("127.0.0.1")
        assert proxy_bypass_environment("example.org")

    episode(play, Engine())


def test_key_ends_with_its_episode() -> None:
    kept: list[dict[str, str]] = []

    async def play(client: Any, env: dict[str, str]) -> None:
        kept.append(env)
        await ask(client, [USER])
        if len(kept) == 2:
            status, reply = await post(kept[0], json.dumps({"messages": [USER]}).encode())
            assert (status, reply["error"]["code"]) == (401, "invalid_api_key")

    async def run() -> None:
        engine = Engine()
        agent = program(play, engine)
        for _ in range(2):
            await agent.run(PROMPT, engine)
        await agent.close()

    asyncio.run(run())


def test_completion_is_aborted_and_not_trained_when_client_disconnects() -> None:
    engine = Engine()

    async def play(client: Any) -> None:
        engine.hold = asyncio.Event()
        request = asyncio.create_task(ask(client, [USER], stream=True))
        await engine.holding.wait()
        request.cancel()
        while not engine.cancelled:
            await asyncio.sleep(0.01)
        engine.hold = None
        await ask(client, [USER])

    trajectory = episode(play, engine)
    assert len(trajectory.turns) == 1
    assert_exact(trajectory, engine)


def test_requests_in_progress_are_aborted_when_program_returns() -> None:
    engine = Engine()
    late: list[Any] = []

    async def play(client: Any) -> None:
        await ask(client, [USER])
        engine.hold = asyncio.Event()
        late.append(asyncio.create_task(ask(client, [USER])))
        await engine.holding.wait()

    async def run() -> None:
        agent = program(play, engine)
        trajectory = await agent.run(PROMPT, engine)
        assert engine.cancelled == 1 and len(trajectory.turns) == 1
        with pytest.raises(openai.AuthenticationError, match="episode has ended"):
            await late[0]
        await agent.close()

    asyncio.run(run())


def test_engine_failure_fails_episode_even_if_program_hides_it() -> None:
    class Broken(Engine):
        async def __call__(self, context: Any, **limits: Any) -> Any:
            raise RolloutError("the engine is gone")

    async def play(client: Any) -> float:
        with pytest.raises(openai.InternalServerError, match="the engine is gone"):
            await ask(client, [USER])
        return 1.0

    with pytest.raises(RolloutError, match=r"^the engine is gone"):
        episode(play, Broken())


@pytest.mark.parametrize(
    ("limits", "end", "code"),
    [
        (Limits(2, 20_000, 30.0), End.TURNS, "max_turns"),
        (Limits(64, 60, 30.0), End.CONTEXT, "context_length_exceeded"),
    ],
)
def test_limit_ends_episode_with_its_reason(limits: Limits, end: End, code: str) -> None:
    codes = []

    async def play(client: Any) -> float:
        messages: list[Any] = [USER]
        while True:
            try:
                reply = await ask(client, messages)
            except openai.BadRequestError as error:
                codes.append(error.code)
                raise
            messages += [reply.choices[0].message, {"role": "user", "content": "again, please"}]

    engine = Engine()
    trajectory = episode(play, engine, limits=limits)
    assert (trajectory.end, trajectory.reward, codes) == (end, None, [code])
    assert_exact(trajectory, engine)


@pytest.mark.parametrize(("recovers", "end"), [(True, End.DONE), (False, End.CONTEXT)])
def test_limit_does_not_end_an_episode_that_continues_with_a_shorter_request(
    recovers: bool, end: End
) -> None:
    async def play(client: Any) -> float:
        await ask(client, [USER])
        with pytest.raises(openai.BadRequestError, match="expected fewer than 60"):
            await ask(client, [{"role": "user", "content": "x " * 200}])
        if recovers:
            await ask(client, [{"role": "user", "content": "summary"}])
        return 1.0

    trajectory = episode(play, Engine(), limits=Limits(64, 60, 30.0))
    assert (trajectory.end, trajectory.reward) == (end, 1.0)


def test_greedy_run_accepts_every_temperature() -> None:
    async def play(client: Any) -> None:
        await ask(client, [USER], temperature=0.3, top_p=0.5)

    episode(play, Engine(), sampling=Sampling(64, temperature=0.0))


def test_plain_function_runs_in_thread_with_plain_client() -> None:
    def play(client: openai.OpenAI, row: dict[str, Any]) -> dict[str, float]:
        reply = client.chat.completions.create(model="policy", messages=[USER])
        assert isinstance(client, openai.OpenAI)
        return {"reward": 1, "length": len(reply.choices[0].message.content or "")}

    trajectory = episode(play, Engine("four"))
    assert (trajectory.reward, trajectory.details) == (1.0, {"length": 4.0})


def test_separate_program_finds_endpoint_by_environment_variables() -> None:
    code = (
        "from openai import OpenAI\n"
        "message = {'role': 'user', 'content': 'hello'}\n"
        "reply = OpenAI().chat.completions.create(model='policy', messages=[message])\n"
        "print(reply.choices[0].message.content)\n"
    )

    def play(env: dict[str, str]) -> None:
        result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
        assert result.stdout == b"from the engine\n", result.stderr

    assert episode(play, Engine("from the engine")).text == "from the engine"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("good", "returned 'good'"),
        (float("nan"), "returned nan"),
        (ValueError("no"), "no"),
        (SystemExit(0), "raised SystemExit: 0"),
        (ExceptionGroup("tasks", [ValueError("no")]), "raised ValueError: no"),
        (asyncio.CancelledError(), "raised CancelledError"),
    ],
)
def test_program_fails_its_trajectory_when_it_raises_or_returns_no_number(
    result: Any, message: str
) -> None:
    async def play(client: Any) -> Any:
        await ask(client, [USER])
        if isinstance(result, BaseException):
            raise result
        return result

    with pytest.raises(RolloutError, match=f"prompt 'q'.*{message}") as failed:
        episode(play, Engine())
    assert not isinstance(result, BaseException) or "test_agent_program.py:" in str(failed.value)


def test_program_without_completion_fails_its_trajectory() -> None:
    with pytest.raises(RolloutError, match="ended without a completion"):
        episode(lambda row: 1.0, Engine())


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        (Limits(2, 20_000, 30.0), "rollout.max_turns"),
        (Limits(64, 3, 30.0), "messages: .* tokens; expected fewer than 3"),
    ],
)
def test_program_without_completion_names_limit_that_it_exceeded(
    limits: Limits, problem: str
) -> None:
    async def play(client: Any) -> None:
        await asyncio.gather(*(ask(client, [USER]) for _ in range(3)))

    engine = Engine()
    engine.hold = asyncio.Event()
    with pytest.raises(RolloutError, match=rf"ended without a completion \(.*{problem}"):
        episode(play, engine, limits=limits)


def test_episodes_go_on_when_a_program_closes_its_client() -> None:
    async def play(client: Any) -> None:
        async with client:
            await ask(client, [USER])

    def plain(client: Any) -> None:
        with client:
            client.chat.completions.create(model="policy", messages=[USER])

    async def run(play: Any) -> None:
        engine = Engine()
        agent = program(play, engine)
        for _ in range(2):
            assert len((await agent.run(PROMPT, engine)).turns) == 1
        await agent.close()

    asyncio.run(run(play))
    asyncio.run(run(plain))


def test_error_names_line_of_plain_function_that_exits() -> None:
    def play(row: Any) -> None:
        sys.exit(3)

    with pytest.raises(RolloutError, match=r"SystemExit\(3\) .*test_agent_program.py:\d+"):
        episode(play, Engine())


@pytest.mark.parametrize("name", ["DefaultAsyncHttpxClient", "DefaultHttpxClient"])
def test_client_has_as_many_connections_as_its_server(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    make = getattr(openai, name)
    monkeypatch.setattr(openai, name, lambda **given: (made.append(given), make(**given))[1])

    async def play(client: Any) -> None:
        await ask(client, [USER])

    def plain(client: Any) -> None:
        client.chat.completions.create(model="policy", messages=[USER])

    episode(play if "Async" in name else plain, Engine())
    assert made[0]["limits"].max_connections == MAX_CONNECTIONS


def test_episodes_may_need_more_open_files_than_usual_limit() -> None:
    count, limits = 60, resource.getrlimit(resource.RLIMIT_NOFILE)
    engine = Engine()
    engine.hold = asyncio.Event()

    async def play(client: Any) -> None:
        await ask(client, [USER])

    async def run() -> None:
        agent = program(play, engine)
        episodes = asyncio.gather(*(agent.run(PROMPT, engine) for _ in range(count)))
        async with asyncio.timeout(60):
            while len(engine.asked) < count:
                await asyncio.sleep(0.01)
            engine.hold.set()
            await episodes
        await agent.close()

    used = len(os.listdir("/dev/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + count, limits[1]))
        asyncio.run(run())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_object_with_async_call_is_async_program() -> None:
    class Player:
        async def __call__(self, client: openai.AsyncOpenAI) -> float:
            await ask(client, [USER])
            return 0.5

    assert episode(Player(), Engine()).reward == 0.5
