"""Environment workers behind another worker, as on a cluster; here that worker is a process."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.environment.conversation import Conversation
from paceline.environment.remote import RemoteProcess
from paceline.errors import ConfigError, RolloutError, WorkerDied
from paceline.remote.process import ProcessWorker
from paceline.remote.worker import Build, Worker
from paceline.rollout.environment import open_environment
from paceline.types import End
from tests.processes import children
from tests.scoring import alive, in_loop, until
from tests.unit.test_conversation import Model, said
from tests.unit.test_environment_workers import (
    DATA,
    FILE,
    LIMITS,
    play,
    pool_of,
    prompt_of,
    tokenizer_of,
)


@asynccontextmanager
async def opened(
    name: str, folder: Path, launched: list[str] | None = None, failing: int = 0
) -> AsyncIterator[Conversation]:
    """Open an environment with one worker. The launch of number `failing` fails."""
    names = [] if launched is None else launched

    async def launch(name: str, build: Build, args: tuple[Any, ...]) -> Worker:
        names.append(name)
        if len(names) == failing:
            raise WorkerDied("no node has a free CPU")
        log = folder / f"{name}.log"
        return ProcessWorker(name, build, args, cores=[], threads=1, log_path=log)

    agent = open_environment(f"{FILE}:{name}", tokenizer_of("chatml"), DATA, LIMITS, workers=1)
    assert isinstance(agent, Conversation) and agent.pool
    try:
        await agent.pool.start(launch)
        yield agent
    finally:
        await agent.pool.close()
        assert not agent.pool.processes() and not children()


def pids(agent: Conversation) -> tuple[int, int]:
    """Return the process that runs user code, and the worker that has started it."""
    (process,) = pool_of(agent).processes()
    assert isinstance(process, RemoteProcess)
    pid = int(process.worker.partition("process ")[2].split()[0])
    return pid, psutil.Process(pid).ppid()


@pytest.mark.parametrize("killed", [0, 1], ids=["process", "its worker"])
@in_loop
async def test_killed_worker_fails_its_episode_and_is_replaced(killed: int, tmp_path: Path) -> None:
    async with opened("Slow", tmp_path) as agent:
        before = pids(agent)
        episode = asyncio.ensure_future(
            agent.run(prompt_of({"seconds": 600}), Model(said("a"), said("stop")))
        )
        await until(lambda: pool_of(agent).processes()[0].episodes == 1)
        os.kill(before[killed], signal.SIGKILL)
        named = (
            rf"environment worker 0 \(process {before[0]} on .*\) died during (reset|step)\(\): "
        )
        with pytest.raises(RolloutError, match=named):
            await episode
        assert (await play(agent, "stop", seconds=0)).end is End.DONE
        await until(lambda: not any(map(alive, before)))
        assert pool_of(agent).replaced == 1


@in_loop
async def test_episode_starts_worker_when_its_replacement_failed_to_start(tmp_path: Path) -> None:
    launched: list[str] = []
    async with opened("Slow", tmp_path, launched, failing=2) as agent:
        os.kill(pids(agent)[0], signal.SIGKILL)
        await until(lambda: len(launched) == 2)
        assert (await play(agent, "stop", seconds=0)).end is End.DONE
        assert len(launched) == 3


@in_loop
async def test_cancelled_episode_is_closed_in_its_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with opened("Slow", tmp_path) as agent:
        episode = asyncio.ensure_future(
            agent.run(prompt_of({"seconds": 600, "log": str(log)}), Model(said("a")))
        )
        await until(lambda: pool_of(agent).processes()[0].episodes == 1)
        episode.cancel()
        await asyncio.wait([episode])
        await until(lambda: log.exists() and log.read_text() == "close\n")
        assert pool_of(agent).replaced == 0


@in_loop
async def test_code_that_cannot_be_loaded_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.environment = '.*:NoSuch': no 'NoSuch' in"):
        async with opened("NoSuch", tmp_path):
            pass
