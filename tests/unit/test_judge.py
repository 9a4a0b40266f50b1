"""Reward of a judge over real HTTP: the endpoint of Paceline, and servers that misbehave."""

import asyncio
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from paceline.endpoint.request import ChatRequest
from paceline.endpoint.server import EndpointServer
from paceline.endpoint.session import Chat, Session
from paceline.errors import ConfigError, DataError, RewardError
from paceline.reward import judge
from paceline.reward.judge import JudgeReward, JudgeSettings
from paceline.reward.reward import RewardSettings, WeightedReward, open_reward
from paceline.types import Completion, Prompt, Trajectory
from tests.endpoints import Engine, said, served

ROW = {"prompt": "Name a color.", "answer": "red"}
PROMPT = Prompt("row 1", (1,), "", ROW)


def completions(*texts: str) -> list[Trajectory]:
    return [Trajectory((), text) for text in texts]


async def scores(url: str, *texts: str, run_dir: Path | None = None, **settings: Any) -> Any:
    chosen = JudgeSettings(model="judge", base_url=url, **settings)
    reward = JudgeReward(chosen, "prompt", run_dir)
    try:
        return await reward.score(PROMPT, completions(*texts))
    finally:
        await reward.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(judge, "LONGEST_PAUSE_S", 0.01)


def test_judge_scores_with_endpoint_of_paceline(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine("It is fine.\nScore: 7", "**Score:** 2.5")

    class Model:
        max_length = 10_000

        def check(self, request: ChatRequest) -> None:
            assert (request.model, request.temperature) == ("judge", 0)

        async def generate(self, context: Any, request: ChatRequest, choice: int) -> Completion:
            return await engine(context)

    async def run() -> Any:
        server = EndpointServer("judge")
        await server.start()
        key = server.open(Session(Chat(engine.tokenizer), Model(), keep=False))
        monkeypatch.setenv("JUDGE_KEY", key)
        try:
            return await scores(
                server.url,
                "blue",
                "a car",
                api_key_env="JUDGE_KEY",
                prompt="Expected: {answer}. Asked: {prompt} Said: {completion} {other}",
                concurrency=1,
            )
        finally:
            await server.close()

    assert asyncio.run(run()) == [0.7, 0.25]
    text = engine.tokenizer.decode(engine.seen[0][0])
    assert "Expected: red. Asked: Name a color. Said: blue {other}" in text


def test_failed_requests_are_repeated() -> None:
    failures = [
        web.json_response({}, status=500),
        web.Response(text="busy", status=429, headers={"Retry-After": "0.005"}),
        said("I cannot decide."),
        said("Score: 11"),
        web.Response(text="not JSON"),
    ]

    async def reply(request: Any) -> web.Response:
        return failures.pop(0) if failures else said("Score: 3\nScore: 4")

    async def run() -> Any:
        async with served(reply) as url:
            return await scores(url, "blue")

    assert asyncio.run(run()) == [0.4] and not failures


@pytest.mark.parametrize(
    ("response", "problem", "expected"),
    [
        (lambda: web.Response(text="no such model", status=404), "status 404: no such model", 1),
        (lambda: web.Response(text="down", status=503), "status 503: down", 3),
        (lambda: said("well"), "no number that reward.judge.pattern finds in 'well'", 3),
        (lambda: said("Score: -1"), "the score -1 is outside of 0 to 10", 3),
    ],
)
def test_failure_is_error_and_never_reward(
    response: Callable[[], web.Response], problem: str, expected: int
) -> None:
    asked = 0

    async def reply(request: Any) -> web.Response:
        nonlocal asked
        asked += 1
        return response()

    async def run() -> None:
        async with served(reply) as url:
            await scores(url, "blue", retries=2)

    with pytest.raises(RewardError, match=f"no score for prompt 'row 1' in {expected} .*{problem}"):
        asyncio.run(run())
    assert asked == expected


def test_unreachable_and_slow_servers_are_errors() -> None:
    async def hang(request: Any) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError

    async def run() -> None:
        async with served(hang) as url:
            with pytest.raises(RewardError, match=r"no reply within 0\.1 s"):
                await scores(url, "blue", retries=1, timeout_s=0.1)
        with pytest.raises(RewardError, match="Connect"):
            await scores(url, "blue", retries=1)

    asyncio.run(run())


def test_redirect_to_invalid_host_is_error() -> None:
    async def reply(request: Any) -> web.Response:
        return web.Response(status=307, headers={"Location": "http://judge..example/v1"})

    async def run() -> None:
        async with served(reply) as url:
            with pytest.raises(RewardError, match=r"in 1 request\(s\): UnicodeError"):
                await scores(url, "blue", retries=0)

    asyncio.run(run())


def test_scores_are_kept_in_run_directory_and_requests_limited(tmp_path: Path) -> None:
    asked, running, most = [], 0, 0
    full = asyncio.Event()  # as many requests at the same time as allowed

    async def reply(request: Any) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        asked.append((await request.json())["messages"][0]["content"])
        if running == 3:
            full.set()
        await full.wait()
        await asyncio.sleep(0.01)  # more than three would arrive in this time
        running -= 1
        return said("Score: 5")

    async def run() -> None:
        async with served(reply) as url:
            texts = [f"text {number}" for number in range(9)]
            first = await scores(url, *texts, run_dir=tmp_path, concurrency=3)
            with (tmp_path / judge.CACHE).open("a") as file:
                file.write('{"request": "cut o')  # of a killed run
            again = await scores(url, *texts, "new", run_dir=tmp_path, concurrency=3)
            assert first == [0.5] * 9 and again == [0.5] * 10
            assert await scores(url, "new", run_dir=tmp_path) == [0.5]

    asyncio.run(run())
    assert len(asked) == 10 and most == 3
    assert len((tmp_path / judge.CACHE).read_text().splitlines()) == 10


def test_damaged_scores_are_requested_again(tmp_path: Path) -> None:
    asked: list[Any] = []

    async def reply(request: Any) -> web.Response:
        asked.append(await request.json())
        return said("Score: 5")

    async def run() -> None:
        file = tmp_path / judge.CACHE
        async with served(reply) as url:
            await scores(url, "a", "b", "c", run_dir=tmp_path)
            good = file.read_bytes().splitlines(keepends=True)
            file.write_bytes(good[0].replace(b"5.0", b"9.0") + b"\xff\xfe\n" + b"".join(good[1:]))
            assert await scores(url, "a", "b", "c", run_dir=tmp_path) == [0.5] * 3
            lines = [b'{"request": "%b", "number": 70}\n' % json.loads(good[0])["request"].encode()]
            file.write_bytes(b"".join(lines))  # out of range, without a checksum
            assert await scores(url, "a", run_dir=tmp_path) == [0.5]

    asyncio.run(run())
    assert len(asked) == 5, "a damaged number was used, or an intact one was not"


def test_judge_is_one_of_several_rewards_and_checks_columns() -> None:
    async def reply(request: Any) -> web.Response:
        return said("Score: 10")

    async def run() -> None:
        async with served(reply) as url:
            given = {"model": "m", "base_url": url, "prompt": "{completion} {answer}"}
            settings = RewardSettings(
                function=("judge", "exact"), weights=(1.0, 0.5), judge=JudgeSettings(**given)
            )
            reward = await open_reward(settings, None)
            assert isinstance(reward, WeightedReward)
            (score,) = await reward.score(PROMPT, completions("red"))
            assert score == {"reward": 1.5, "judge": 1.0, "exact": 1.0}
            with pytest.raises(DataError, match="row 2 has no column 'answer'"):
                reward.check([("row 2", {"prompt": "?"})])
            await reward.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"function": "judge"}, "need each other"),
        ({"function": "exact", "judge": {"model": "m"}}, "need each other"),
        ({"judge": {"model": "m", "prompt": "rate it"}}, "does not contain {completion}"),
        ({"judge": {"model": "m", "pattern": "[0-9]+"}}, "has no group"),
        ({"judge": {"model": "m", "pattern": "("}}, "reward.judge.pattern"),
        ({"judge": {"model": "m", "range": [3, 3]}}, "expected low < high"),
        ({"judge": {"model": "m", "base_url": "localhost"}}, "expected http"),
        ({"judge": {"model": "m", "base_url": "http://127.0.0.1:99999/v1"}}, "expected http"),
        ({"judge": {"model": "m", "base_url": "http://judge..example/v1"}}, "expected http"),
        ({"judge": {"model": "m", "base_url": "http:///v1"}}, "expected http"),
        ({"judge": {"model": "m", "options": {"stream": True}}}, "cannot be set there"),
        ({"judge": {"model": "m", "options": {"since": date(2026, 1, 1)}}}, "expected JSON values"),
    ],
)
def test_wrong_settings_are_rejected(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as failed:
        RewardSettings(**{"function": "judge"} | settings)
    assert problem in str(failed.value)


def test_key_comes_from_named_variable_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="'MY_JUDGE_KEY': this environment variable is not set"):
        JudgeReward(JudgeSettings(model="m", api_key_env="MY_JUDGE_KEY"), "prompt", None)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    headers: list[Any] = []

    async def reply(request: Any) -> web.Response:
        headers.append(request.headers)
        return said("Score: 1")

    async def run() -> None:
        async with served(reply) as url:
            await scores(url, "blue")

    asyncio.run(run())
    assert "sk-secret" not in json.dumps(dict(headers[0]))


def test_equal_requests_in_progress_are_sent_once() -> None:
    asked = 0

    async def reply(request: Any) -> web.Response:
        nonlocal asked
        asked += 1
        return said("Score: 5") if asked > 1 else web.Response(status=503)

    async def run() -> Any:
        async with served(reply) as url:
            return await scores(url, "blue", "blue", "blue")

    assert asyncio.run(run()) == [0.5] * 3
    assert asked == 2


def test_requests_at_same_time_reach_setting_when_it_is_large() -> None:
    count, running = 130, 0
    all_there = asyncio.Event()

    async def reply(request: Any) -> web.Response:
        nonlocal running
        running += 1
        if running == count:
            all_there.set()
        await all_there.wait()
        return said("Score: 5")

    async def run() -> Any:
        async with served(reply) as url:
            texts = [f"text {number}" for number in range(count)]
            return await scores(url, *texts, concurrency=count, timeout_s=60, retries=0)

    assert asyncio.run(run()) == [0.5] * count


def test_key_loses_line_end_and_cannot_break_header(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = JudgeSettings(model="judge", api_key_env="JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "sk-secret\r\n")
    assert settings.key() == "sk-secret"
    monkeypatch.setenv("JUDGE_KEY", "sk-\u201csecret")
    with pytest.raises(ConfigError, match="'JUDGE_KEY': the key contains a character") as rejected:
        settings.key()
    assert "secret" not in str(rejected.value)


def test_reply_without_end_is_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "MAX_REPLY", 1000)

    async def run() -> None:
        async with served(flood) as url:
            await scores(url, "blue", retries=0)

    async def flood(request: Any) -> web.Response:
        return web.Response(text="x" * 100_000)

    with pytest.raises(RewardError, match="the reply has more than 1000 bytes"):
        asyncio.run(run())
