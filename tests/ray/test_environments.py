"""Environment workers on Ray: their nodes, their failures and replacements, and nothing left."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.config import load_config
from paceline.environment.conversation import Conversation, Limits
from paceline.errors import ConfigError, RolloutError
from paceline.rollout.environment import open_environment
from paceline.run import train
from paceline.types import Completion, End
from paceline.workers.ray.cluster import RayCluster
from tests.audits import assert_consistent
from tests.fault_report import Fault
from tests.ray.test_runs import on_ray, workers_left
from tests.scoring import alive, in_loop, until
from tests.small_runs import SMALL
from tests.unit.test_conversation import Model, said
from tests.unit.test_environment_workers import (
    DATA,
    FILE,
    play,
    pool_of,
    prompt_of,
    tokenizer_of,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_environment.py"


@asynccontextmanager
async def opened(
    address: str, folder: Path, name: str, workers: int = 1, **settings: Any
) -> AsyncIterator[Conversation]:
    config = load_config(None, ["cluster=ray", f"ray.address={address}"])
    cluster = await RayCluster.open(config, "no model", folder / "logs")
    limits = Limits(6, 4000, settings.pop("timeout_s", 30.0))
    chosen = f"{FILE}:{name}" if name else None
    agent = open_environment(
        chosen, tokenizer_of("chatml"), DATA, limits, workers=workers, **settings
    )
    assert isinstance(agent, Conversation) and agent.pool
    try:
        await agent.pool.start(cluster.launcher())
        yield agent
    finally:
        await agent.pool.close()
        await cluster.close()
        assert not agent.pool.processes() and not workers_left()


def pids(agent: Conversation) -> list[int]:
    """Return the processes that run user code, from the names of the workers."""
    found = [re.search(r"process (\d+) on ", each.worker) for each in pool_of(agent).processes()]
    return [int(each[1]) for each in found if each]


def actor(pid: int) -> psutil.Process:
    """Return the actor that has started a process."""
    found = psutil.Process(pid).parent()
    assert found and "RayHost" in " ".join(found.cmdline())
    return found


@in_loop
async def test_episodes_run_in_workers_on_all_nodes(address: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with opened(address, tmp_path, "Echo", workers=4) as agent:
        row = {"log": str(log)}
        played = await asyncio.gather(*(play(agent, "a", "stop", **row) for _ in range(8)))
        assert all(each.end is End.DONE for each in played)
        assert [turn.reward for turn in played[0].turns] == [0.5, 0.5]
        lines = log.read_text().splitlines()
        assert {lines.count(f"step {pid}") for pid in pids(agent)} == {4}
        assert lines.count("close") == 8
        raylets = {actor(pid).ppid() for pid in pids(agent)}
        assert len(raylets) == 2, "one node has no environment worker"
        processes = pids(agent)
    assert not any(map(alive, processes))


@pytest.mark.parametrize("killed", ["process", "actor"])
@pytest.mark.fault("A2", "environment worker on Ray killed: {killed}")
@in_loop
async def test_killed_worker_is_replaced_and_only_its_episodes_fail(
    killed: str, address: str, tmp_path: Path, fault: Fault
) -> None:
    async with opened(address, tmp_path, "Echo", workers=2) as agent:
        before = pids(agent)
        lost, waiting = asyncio.Event(), []

        class Waits(Model):
            async def __call__(self, context: tuple[int, ...]) -> Completion:
                if self.contexts:
                    waiting.append(self)  # no call of its environment is in progress
                    await lost.wait()
                return await super().__call__(context)

        episodes = [
            asyncio.ensure_future(agent.run(prompt_of({}), Waits(said("a"), said("stop"))))
            for _ in range(4)
        ]
        await until(lambda: len(waiting) == 4)
        assert sum(each.episodes for each in pool_of(agent).processes()) == 4
        os.kill(before[0] if killed == "process" else actor(before[0]).pid, signal.SIGKILL)
        fault.fired()
        await until(lambda: pool_of(agent).replaced == 1)
        fault.detected()
        lost.set()
        results = await asyncio.gather(*episodes, return_exceptions=True)
        failed = [str(each) for each in results if isinstance(each, RolloutError)]
        named = rf"environment worker 0 \(process {before[0]} on .*\) was lost with its episodes: "
        assert len(failed) == 2 and all(re.search(named, each) for each in failed), results
        assert killed == "actor" or "SIGKILL" in failed[0]
        assert (await play(agent, "stop")).end is End.DONE
        await until(lambda: len(pids(agent)) == 2)
        fault.recovered()
        assert not alive(before[0]) and alive(before[1]) and before[0] not in pids(agent)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("exit", r"environment worker 0 \(process \d+ on .*\) died during step\(\): .*exit code 3"),
        ("block", r"step\(\) took longer than rollout.environment_timeout_s = 1 s; environment "),
        ("fail", r"step\(\) raised KeyError: 'no such move'"),
    ],
)
@in_loop
async def test_failure_of_user_code_fails_its_episode_alone(
    what: str, message: str, address: str, tmp_path: Path
) -> None:
    async with opened(address, tmp_path, "Misbehaving", timeout_s=1.0) as agent:
        before = pids(agent)
        with pytest.raises(RolloutError, match=message):
            await play(agent, "a", what)
        assert (await play(agent, "stop")).end is End.DONE
        assert (pids(agent) == before) is (what == "fail")


@in_loop
async def test_open_episodes_are_closed_when_run_ends(address: str, tmp_path: Path) -> None:
    folders = tmp_path / "folders"
    folders.mkdir()
    async with opened(address, tmp_path, "Folder") as agent:

        async def never(context: tuple[int, ...]) -> Completion:
            return await asyncio.get_running_loop().create_future()

        row = {"folders": str(folders)}
        episodes = [asyncio.ensure_future(agent.run(prompt_of(row), never)) for _ in range(2)]
        await until(lambda: len(list(folders.iterdir())) == 2)
        episodes[0].cancel()
        await asyncio.wait(episodes[:1])
        assert len(list(folders.iterdir())) == 1
    episodes[1].cancel()
    await asyncio.wait(episodes)
    assert not list(folders.iterdir())


@in_loop
async def test_worker_gets_secrets_of_controller_only_if_setting_passes_them(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "canary")
    async with opened(address, tmp_path, "Misbehaving") as agent:
        with pytest.raises(RolloutError, match=r'rollout.environment_pass_env=\["MY_API_KEY"\]'):
            await play(agent, "secret")
    async with opened(address, tmp_path, "Misbehaving", pass_env=["MY_*"]) as agent:
        model = Model(said("secret"), said("stop"))
        await agent.run(prompt_of({}), model)
        assert "canary" in tokenizer_of("chatml").decode(model.contexts[1])


@in_loop
async def test_pool_rejects_what_is_no_environment(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.environment = .*: no 'NoSuch' in"):
        async with opened(address, tmp_path, "NoSuch"):
            pass


@in_loop
async def test_tools_run_in_worker(address: str, tmp_path: Path) -> None:
    call = '<tool_call>{"name": "shout", "arguments": {"text": "hi"}}</tool_call>'
    async with opened(address, tmp_path, "", tools=[f"{FILE}:shout"]) as agent:
        model = Model(said(call), said("done"))
        await agent.run(prompt_of({}), model)
        assert f"HI {pids(agent)[0]}" in tokenizer_of("chatml").decode(model.contexts[1])


def test_run_in_environment_workers_equals_local_run(
    model: str, address: str, tmp_path: Path
) -> None:
    chosen = [f"rollout.environment={EXAMPLE}:Lookup", "steps=2", "save_samples=4"]
    on_ray(model, tmp_path / "ray", address, *chosen, "rollout.environment_workers=2")
    given = [f"model={model}", f"run_dir={tmp_path / 'local'}", *SMALL, *chosen]
    asyncio.run(train(load_config(None, given)))
    found = [_completions(tmp_path / name / "samples.jsonl") for name in ("ray", "local")]
    assert found[0] == found[1] and len(found[0]) == 32
    assert (tmp_path / "ray" / "logs" / "environment-1.log").exists()
    assert_consistent(tmp_path / "ray")
    assert not workers_left()


def _completions(samples: Path) -> list[tuple[str, str, float]]:
    rows = map(json.loads, samples.read_text().splitlines())
    return [
        (row["uid"], each["text"], each["reward"]) for row in rows for each in row["completions"]
    ]
