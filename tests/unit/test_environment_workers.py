"""Environment workers: episodes in processes, their failures, replacements, and nothing left."""

import asyncio
import os
import pickle
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.environment.conversation import Conversation, Limits
from paceline.environment.pool import EnvironmentPool
from paceline.environment.worker import Episodes, Server
from paceline.errors import ConfigError, RolloutError
from paceline.rollout.environment import open_environment
from paceline.types import Completion, End, Prompt, Trajectory
from tests.chat_templates import tokenizer_of
from tests.episodes import DATA
from tests.processes import children
from tests.scoring import alive, in_loop, until
from tests.unit.test_conversation import LIMITS, Model, said

FILE = Path(__file__).parent / "hosted_environments.py"


@asynccontextmanager
async def opened(
    name: str, workers: int = 1, timeout_s: float = 30.0, **settings: Any
) -> AsyncIterator[Conversation]:
    limits = Limits(6, 4000, timeout_s)
    agent = open_environment(
        f"{FILE}:{name}" if name else None,
        tokenizer_of("chatml"),
        DATA,
        limits,
        workers=workers,
        **settings,
    )
    assert isinstance(agent, Conversation) and agent.pool
    try:
        await agent.pool.start()
        yield agent
    finally:
        await agent.pool.close()
        assert not agent.pool.processes()


async def play(agent: Conversation, *texts: str, **row: Any) -> Trajectory:
    return await agent.run(prompt_of(row), Model(*map(said, texts)))


def prompt_of(row: dict[str, Any]) -> Prompt:
    return Prompt("q7", (1,), "", {"prompt": "What?"} | row)


def pool_of(agent: Conversation) -> EnvironmentPool:
    assert agent.pool
    return agent.pool


def pids(agent: Conversation) -> list[int]:
    return [process.pid for process in pool_of(agent).processes()]


@in_loop
async def test_episode_in_worker_equals_episode_in_controller(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with opened("Echo") as agent:
        trajectory = await play(agent, "a", "b", "stop", log=str(log))
        steps = log.read_text().split()
        assert set(steps) == {"step", str(pids(agent)[0]), "close"} and steps[-1] == "close"
    local = open_environment(f"{FILE}:Echo", tokenizer_of("chatml"), DATA, LIMITS)
    expected = await local.run(prompt_of({}), Model(*map(said, ("a", "b", "stop"))))
    assert [turn.prompt for turn in trajectory.turns] == [turn.prompt for turn in expected.turns]
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.5, 0.5]
    assert trajectory.end is End.DONE


@in_loop
async def test_one_worker_runs_many_episodes_at_once() -> None:
    async with opened("Slow") as agent:
        started = time.monotonic()
        await asyncio.gather(*(play(agent, "a", "stop", seconds=0.5) for _ in range(200)))
        assert time.monotonic() - started < 30  # one after another: 200 s


@in_loop
async def test_episodes_are_distributed_over_workers(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with opened("Slow", workers=2) as agent:
        await asyncio.gather(*(play(agent, "stop", log=str(log)) for _ in range(8)))
        lines = log.read_text().splitlines()
        assert {lines.count(f"step {pid}") for pid in pids(agent)} == {4}


@pytest.mark.parametrize("what", ["block", "hold_the_gil"])
@in_loop
async def test_blocked_worker_is_killed_and_only_its_episodes_fail(what: str) -> None:
    async with opened("Misbehaving", workers=2, timeout_s=1.0) as agent:
        before = pids(agent)
        resting = asyncio.Event()

        class Waits(Model):
            """Generates until the blocked worker was killed."""

            async def __call__(self, context: tuple[int, ...]) -> Completion:
                if self.contexts:
                    await resting.wait()
                return await super().__call__(context)

        others = [
            asyncio.ensure_future(agent.run(prompt_of({}), Waits(said("a"), said("stop"))))
            for _ in range(3)
        ]
        await until(lambda: sum(p.episodes for p in pool_of(agent).processes()) == 3)
        late = r"prompt 'q7': step\(\) took longer than rollout.environment_timeout_s = 1 s; "
        with pytest.raises(RolloutError, match=late + r"environment worker 1 \(process \d+\)"):
            await play(agent, what)
        await until(lambda: not alive(before[1]) and len(set(pids(agent)) - set(before)) == 1)
        resting.set()
        results = await asyncio.gather(*others, return_exceptions=True)
        failed = [str(result) for result in results if isinstance(result, RolloutError)]
        assert len(failed) == 1 and "was lost with its episodes: a call blocked it" in failed[0]
        assert alive(before[0]) and (await play(agent, "stop")).end is End.DONE


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("exit", "exit code 3"),
        ("segfault", "signal SIGSEGV"),
        ("leave_in_task", "exit code 1"),
        ("interrupt", "signal SIGINT"),
    ],
)
@in_loop
async def test_crashed_worker_is_replaced_and_episode_names_it(what: str, cause: str) -> None:
    async with opened("Misbehaving") as agent:
        (before,) = pids(agent)
        named = rf"environment worker 0 \(process {before}\) died during step\(\): .*{cause}"
        with pytest.raises(RolloutError, match=named):
            await play(agent, "a", what)
        assert (await play(agent, "stop")).end is End.DONE
        assert before not in pids(agent) and pool_of(agent).replaced == 1


@in_loop
async def test_worker_that_is_killed_between_calls_fails_its_episodes() -> None:
    async with opened("Echo") as agent:
        (process,) = pool_of(agent).processes()

        class Kills(Model):
            async def __call__(self, context: tuple[int, ...]) -> Completion:
                if self.contexts:
                    os.kill(process.pid, signal.SIGKILL)
                    await until(lambda: process.lost)
                return await super().__call__(context)

        with pytest.raises(RolloutError, match=r"was lost with its episodes: .*SIGKILL"):
            await agent.run(prompt_of({}), Kills(said("a"), said("b")))
        assert (await play(agent, "stop")).end is End.DONE


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("wait", r"step\(\) took longer than rollout.environment_timeout_s = 1 s$"),
        ("fail", r"step\(\) raised KeyError: 'no such move' \(.*hosted_environments.py:\d+\)"),
        ("leave", r"step\(\) raised SystemExit: bye"),
        ("flood", r"step\(\) returned 90000\d\d bytes; expected at most"),
        ("odd", r"step\(\) returned what cannot be serialized as JSON: object is not"),
    ],
)
@in_loop
async def test_failed_call_fails_its_episode_and_worker_continues(what: str, message: str) -> None:
    async with opened("Misbehaving", timeout_s=1.0 if what == "wait" else 60.0) as agent:
        before = pids(agent)
        with pytest.raises(RolloutError, match=message):
            await play(agent, "a", what)
        assert (await play(agent, "stop")).end is End.DONE
        assert pids(agent) == before


@in_loop
async def test_forged_reply_ends_worker_and_not_run() -> None:
    async with opened("Misbehaving") as agent:
        before = pids(agent)
        with pytest.raises(RolloutError, match=r"died during step.*invalid reply: more than"):
            await play(agent, "forge")
        assert (await play(agent, "stop")).end is End.DONE
        assert pids(agent) != before


@in_loop
async def test_flood_of_output_is_discarded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="paceline.remote.child"):
        async with opened("Misbehaving") as agent:
            assert (await play(agent, "flood_output", "stop")).end is End.DONE
    assert sum(len(record.getMessage()) for record in caplog.records) < 3 << 20
    assert any("discarding the rest" in record.getMessage() for record in caplog.records)


@in_loop
async def test_forked_worker_does_not_answer_twice() -> None:
    async with opened("Misbehaving") as agent:
        trajectory = await play(agent, "fork", "fork", "stop")
        assert len(trajectory.turns) == 3
        (process,) = pool_of(agent).processes()
        forked = psutil.Process(process.pid).children()
        assert len(forked) == 2  # the user's code would have to wait for them
        await until(lambda: {child.status() for child in forked} == {psutil.STATUS_ZOMBIE})


@pytest.mark.parametrize("last", ["stop", "exit"])
@in_loop
async def test_daemons_of_environment_end_with_their_worker(last: str, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    async with opened("Misbehaving") as agent:
        if last == "exit":
            with pytest.raises(RolloutError, match="exit code 3"):
                await play(agent, "start_daemons", last, pids=str(file))
        else:
            await play(agent, "start_daemons", last, pids=str(file))
    found = [int(line) for line in file.read_text().split()]
    assert len(found) == 2
    await until(lambda: not any(map(alive, found)))


@in_loop
async def test_open_episodes_are_closed_when_run_ends(tmp_path: Path) -> None:
    before = children()
    descriptors = psutil.Process().num_fds()
    async with opened("Folder", workers=2) as agent:

        async def never(context: tuple[int, ...]) -> Completion:
            return await asyncio.get_running_loop().create_future()

        row = {"folders": str(tmp_path)}
        episodes = [asyncio.ensure_future(agent.run(prompt_of(row), never)) for _ in range(4)]
        await until(lambda: len(list(tmp_path.iterdir())) == 4)
        episodes[0].cancel()  # one is closed by its conversation, the others by their worker
        await asyncio.wait(episodes[:1])
        assert len(list(tmp_path.iterdir())) == 3
    for episode in episodes:
        episode.cancel()
    await asyncio.gather(*episodes, return_exceptions=True)
    assert not list(tmp_path.iterdir()) and children() == before
    await until(lambda: psutil.Process().num_fds() <= descriptors)


@in_loop
async def test_worker_whose_close_hangs_is_replaced() -> None:
    async with opened("ClosesLate", timeout_s=1.0) as agent:
        (before,) = pids(agent)
        assert (await play(agent, "stop")).end is End.DONE
        await until(lambda: not alive(before) and len(pids(agent)) == 1)
        assert pool_of(agent).replaced == 1


@in_loop
async def test_worker_gets_secrets_only_if_setting_passes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_API_KEY", "canary")
    async with opened("Misbehaving") as agent:
        with pytest.raises(RolloutError, match=r'rollout.environment_pass_env=\["MY_API_KEY"\]'):
            await play(agent, "secret")
    async with opened("Misbehaving", pass_env=["MY_*"]) as agent:
        model = Model(said("secret"), said("stop"))
        await agent.run(prompt_of({}), model)
        assert "canary" in tokenizer_of("chatml").decode(model.contexts[1])


@in_loop
async def test_tools_run_in_worker() -> None:
    call = '<tool_call>{"name": "shout", "arguments": {"text": "hi"}}</tool_call>'
    async with opened("", tools=[f"{FILE}:shout", "calculator"]) as agent:
        model = Model(said(call), said("done"))
        await agent.run(prompt_of({}), model)
        shown = tokenizer_of("chatml").decode(model.contexts[1])
        assert f"HI {pids(agent)[0]}" in shown


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("hang", r"the tool hang\(\) took longer than rollout.environment_timeout_s = 1 s"),
        ("crash", r"environment worker 0 .* died during the tool crash\(\): .*exit code 4"),
    ],
)
@in_loop
async def test_worker_is_replaced_when_tool_hangs_or_crashes(tool: str, message: str) -> None:
    call = f'<tool_call>{{"name": "{tool}", "arguments": {{"text": "hi"}}}}</tool_call>'
    timeout_s = 1.0 if tool == "hang" else 30.0
    async with opened("", tools=[f"{FILE}:{tool}"], timeout_s=timeout_s) as agent:
        (before,) = pids(agent)
        with pytest.raises(RolloutError, match=message):
            await play(agent, call)
        await until(lambda: not alive(before) and len(pids(agent)) == 1)
        assert (await play(agent, "no call")).end is End.DONE


class Replies:
    """The worker's end of the connection, which keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def reply(self, **message: Any) -> None:
        self.sent.append(message)


@in_loop
async def test_worker_replies_when_call_is_cancelled_before_it_begins() -> None:
    link: Any = Replies()
    server = Server(Episodes(f"{FILE}:Echo", {}), link, timeout_s=30.0)
    server._begin(5, 0, "reset", pickle.dumps({}))
    server._begin(0, 0, "cancel", 5)
    await until(lambda: bool(link.sent))
    assert link.sent == [{"number": 5, "problem": "reset() was cancelled"}]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoSuch", "no 'NoSuch' in"),
        ("shout", "has no method `async def reset`"),
    ],
)
@in_loop
async def test_pool_rejects_what_is_no_environment(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout.environment = '.*:{name}': {message}"):
        async with opened(name):
            pass


def test_workers_need_environment_that_they_can_import() -> None:
    class Given:
        async def reset(self, row: Any) -> None: ...
        async def step(self, message: Any) -> None: ...

    for chosen in (None, Given):
        with pytest.raises(ConfigError, match="environment_workers = 2 needs"):
            open_environment(chosen, tokenizer_of("chatml"), DATA, LIMITS, workers=2)  # type: ignore[arg-type]
