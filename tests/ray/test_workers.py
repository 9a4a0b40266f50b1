"""Workers on Ray: on the nodes they were planned for, heard, mourned, fenced, and gone when the run is."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.config import load_config
from paceline.errors import ConfigError, DataError, WorkerDied
from paceline.remote.worker import Worker
from paceline.workers import ray as place_ray
from paceline.workers.cluster import Device, PlannedWorker
from paceline.workers.ray import RayCluster
from tests.ray.parts import build


@asynccontextmanager
async def opened(
    address: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RayCluster]:
    """A cluster whose workers have the test's parts instead of models."""
    monkeypatch.setattr(place_ray, "build_parts", _build)
    cluster = await RayCluster.open(
        load_config(None, ["cluster=ray", f"ray.address={address}"]), "no model", folder
    )
    try:
        yield cluster
    finally:
        await cluster.close()


def _build(*_: Any) -> Any:
    return build()


def on(cluster: RayCluster, name: str, *nodes: int, ranks: int = 0) -> PlannedWorker:
    devices = tuple(Device(cluster.nodes()[node].name, number) for number, node in enumerate(nodes))
    return PlannedWorker(name, (), ranks, pool=name, devices=devices)


async def until(what: Any) -> None:
    async with asyncio.timeout(20):
        while not what():
            await asyncio.sleep(0.01)


async def close(*workers: Worker) -> None:
    await asyncio.gather(*(worker.close() for worker in workers))


def test_workers_live_on_the_nodes_they_were_planned_for_answer_in_order_and_leave_nothing(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> list[int]:
        async with opened(address, tmp_path, monkeypatch) as cluster:
            plans = [on(cluster, "one", 0), on(cluster, "two", 1)]
            await cluster.reserve(plans)
            workers = [await cluster.start(plan) for plan in plans]
            later = await cluster.start(PlannedWorker("later", ()))  # joins without a reservation
            await asyncio.gather(*(worker.ready() for worker in (*workers, later)))
            (one, first_raylet), (two, second_raylet) = [
                await worker.call("part", "where") for worker in workers
            ]
            assert first_raylet != second_raylet, "each node has a raylet of its own"
            assert "RayHost" in " ".join(psutil.Process(one).cmdline()), (
                "the name that other tests look for"
            )
            answers = [workers[0].start_call("part", "note", number) for number in range(100)]
            assert await asyncio.gather(*answers) == list(range(100))
            assert await workers[0].call("part", "noted") == list(range(100))
            with pytest.raises(DataError, match="not this"):
                await workers[1].call("part", "refuse")
            await workers[1].call("part", "say", "hello from two")
            await until(lambda: "hello from two" in (tmp_path / "two.log").read_text())
            assert "hello" not in (tmp_path / "one.log").read_text()
            assert await workers[0].peak_memory() > 50e6
            await close(*workers, later)
            return [one, two]

    pids = asyncio.run(check())
    _, left = psutil.wait_procs(
        [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10
    )
    assert not left


def test_a_killed_worker_is_dead_in_a_moment_and_a_stopped_one_in_the_time_it_may_be_silent(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_ray, "SILENCE_S", 2.0)

    async def check() -> None:
        async with opened(address, tmp_path, monkeypatch) as cluster:
            killed, stopped = (
                await cluster.start(on(cluster, "killed", 0)),
                await cluster.start(on(cluster, "stopped", 1)),
            )
            await asyncio.gather(killed.ready(), stopped.ready())
            pid, _ = await killed.call("part", "where")
            begun = time.monotonic()
            answer = killed.start_call("part", "note", 1)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match="worker 'killed' died"):
                await answer
                await killed.call("part", "note", 2)
                await asyncio.shield(killed.died)
            assert time.monotonic() - begun < 5

            heard: list[Any] = []
            stopped.listen("part", heard.append)
            pid, _ = await stopped.call("part", "where")
            await stopped.call("part", "tick", True)
            await until(lambda: heard)
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(WorkerDied, match=r"worker .stopped. .*has been silent"):
                await asyncio.wait_for(asyncio.shield(stopped.died), 20)
            count = len(heard)
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)
            with pytest.raises(WorkerDied):
                await stopped.call("part", "note", 1)
            assert len(heard) == count, "what a dead worker says is refused"
            again = await cluster.start(
                on(cluster, "stopped", 1)
            )  # another takes its place at once
            await again.ready()
            assert await again.call("part", "note", 7) == 7
            await close(killed, stopped, again)
            await until(lambda: not psutil.pid_exists(pid))

    asyncio.run(check())


def test_ranks_on_two_nodes_are_one_group(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with opened(address, tmp_path, monkeypatch) as cluster:
            plan = on(cluster, "train", 0, 1, ranks=2)
            await cluster.reserve([plan])
            group: Any = await cluster.start(plan)
            await group.ready()
            raylets = {(await rank.call("part", "where"))[1] for rank in group.ranks}
            assert len(raylets) == 2
            assert await asyncio.gather(
                *(group.start_call("part", "total", number) for number in range(5))
            ) == [1, 3, 5, 7, 9]
            pid, _ = await group.ranks[1].call("part", "where")
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match="'train rank 1' died"):
                await asyncio.wait_for(asyncio.shield(group.died), 10)
            await group.close()

    asyncio.run(check())


def test_devices_that_others_hold_and_addresses_where_nobody_is_are_refused(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_ray, "RESERVE_TIMEOUT_S", 1.0)

    async def check() -> None:
        async with opened(address, tmp_path, monkeypatch) as cluster:
            await cluster.reserve([on(cluster, "first", 0, 0, ranks=2)])
            with pytest.raises(ConfigError, match=r"pool 'second' waited .* others use them"):
                await cluster.reserve([on(cluster, "second", 0)])
        with pytest.raises(ConfigError, match="no Ray cluster answers there"):
            async with opened("127.0.0.1:1", tmp_path, monkeypatch):
                pass

    asyncio.run(check())


def test_a_cluster_of_our_own_listens_to_this_machine_only_and_asks_for_a_token(
    tmp_path: Path,
) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")} | {
        "HOME": str(tmp_path)
    }
    shown = subprocess.run(
        [sys.executable, "-c", _LISTENING],
        env=env,
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    ).stdout
    found = json.loads(shown)
    assert len(found["hosts"]) >= 4 and all("127.0.0.1" in host for host in found["hosts"]), found
    assert found["mode"] == "token" and not list(tmp_path.iterdir()), (
        "nothing is written to the user's home"
    )


_LISTENING = """
import json, os, psutil
from paceline.workers.ray import connect
connect("local")
us = [psutil.Process(), *psutil.Process().children(recursive=True)]
hosts = [c.laddr.ip for process in us for c in process.net_connections("inet") if c.status == "LISTEN"]
print(json.dumps({"hosts": hosts, "mode": os.environ["RAY_AUTH_MODE"]}))
"""
