"""Workers on Ray: placement on the planned nodes, calls, death, fencing and cleanup."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from paceline.config import load_config
from paceline.errors import ConfigError, DataError, WorkerDied
from paceline.remote.stacks import write_stacks
from paceline.remote.worker import Worker
from paceline.workers.cluster import Device, Node, PlannedWorker
from paceline.workers.pools import start_worker
from paceline.workers.ray import devices
from paceline.workers.ray import worker as ray_worker
from paceline.workers.ray.cluster import RayCluster
from paceline.workers.ray.joining import find_ray_nodes
from paceline.workers.ray.nodes import living_nodes
from paceline.workers.ray.worker import RayWorker
from tests.fault_report import Fault
from tests.ray.conftest import STORE
from tests.ray.parts import build


@asynccontextmanager
async def opened(
    address: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RayCluster]:
    """Open a cluster whose workers have a test part instead of models."""
    monkeypatch.setattr("paceline.workers.build.build_parts", _build)
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


async def wait_until(true: Any) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


async def close(*workers: Worker) -> None:
    await asyncio.gather(*(worker.close() for worker in workers))


def test_workers_run_on_planned_nodes_and_reply_in_order(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> list[int]:
        async with opened(address, tmp_path, monkeypatch) as cluster:
            plans = [on(cluster, "one", 0), on(cluster, "two", 1)]
            await cluster.reserve(plans)
            workers = [await cluster.start(plan) for plan in plans]
            # Without a reservation: on the node with the fewest workers.
            late = [await cluster.start(PlannedWorker(name, ())) for name in ("three", "four")]
            await asyncio.gather(*(worker.ready() for worker in (*workers, *late)))
            (one, first_raylet), (two, second_raylet), (_, third), (_, fourth) = [
                await worker.call("part", "where") for worker in (*workers, *late)
            ]
            assert first_raylet != second_raylet, "both workers are on one node"
            assert [third, fourth] == [first_raylet, second_raylet]
            # Other tests find worker processes by this name.
            assert "RayHost" in " ".join(psutil.Process(one).cmdline())
            replies = [workers[0].start_call("part", "record", number) for number in range(100)]
            assert await asyncio.gather(*replies) == list(range(100))
            assert await workers[0].call("part", "recorded") == list(range(100))
            with pytest.raises(DataError, match="it failed"):
                await workers[1].call("part", "fail")
            await workers[1].call("part", "output", "hello from two")
            await wait_until(lambda: "hello from two" in (tmp_path / "two.log").read_text())
            assert "hello" not in (tmp_path / "one.log").read_text()
            assert f"process {one} on " in (tmp_path / "one.log").read_text()
            assert await workers[0].peak_memory() > 50e6
            await close(*workers, *late)
            return [one, two]

    pids = asyncio.run(check())
    _, left = psutil.wait_procs(
        [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10
    )
    assert not left


@pytest.mark.parametrize("opens", [True, False])
def test_run_that_is_cancelled_while_it_joins_leaves_ray(
    opens: bool, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined, cancelled = threading.Event(), threading.Event()

    def slow_nodes() -> list[Node]:
        joined.set()
        assert cancelled.wait(60)
        return living_nodes()

    async def check() -> None:
        config = load_config(None, ["cluster=ray", f"ray.address={address}"])
        joining: Any = (
            RayCluster.open(config, "no model", tmp_path) if opens else find_ray_nodes(address)
        )
        task = asyncio.create_task(joining)
        assert await asyncio.to_thread(joined.wait, 60)
        assert ray.is_initialized()
        task.cancel()
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until(lambda: not ray.is_initialized())

    monkeypatch.setattr(devices, "living_nodes", slow_nodes)
    asyncio.run(check())


def test_stacks_contain_blocked_call_of_worker(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with opened(address, tmp_path, monkeypatch) as cluster:
            worker = await cluster.start(on(cluster, "blocked", 0))
            await worker.ready()
            reply, path, text = worker.start_call("part", "block"), tmp_path / "stacks.txt", ""
            async with asyncio.timeout(60):
                while "in block" not in text:  # the call may not have arrived yet
                    path.unlink(missing_ok=True)
                    await asyncio.to_thread(write_stacks, path, "it stalls", [worker])
                    text = path.read_text()
            assert f"worker 'blocked' on node {worker.node}:" in text
            await close(worker)
            reply.cancel()

    asyncio.run(check())


@pytest.mark.fault("A1", "worker on Ray killed")
def test_worker_dies_at_once_when_killed(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    async def check() -> None:
        async with opened(address, tmp_path, monkeypatch) as cluster:
            worker = await cluster.start(on(cluster, "killed", 0))
            await worker.ready()
            pid, _ = await worker.call("part", "where")
            started = time.monotonic()
            reply = worker.start_call("part", "record", 1)
            os.kill(pid, signal.SIGKILL)
            fault.fired()
            with pytest.raises(WorkerDied, match="worker 'killed' died"):
                await reply
                await worker.call("part", "record", 2)
                await asyncio.shield(worker.died)
            fault.detected()
            assert time.monotonic() - started < 5
            await close(worker)

    asyncio.run(check())


@pytest.mark.fault("A10", "node of a Ray cluster killed")
def test_worker_and_node_are_dead_at_once_when_node_is_killed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    extra = cluster.add_node(num_cpus=1, **STORE)
    cluster.wait_for_nodes()

    async def check() -> None:
        async with opened(cluster.address, tmp_path, monkeypatch) as joined:
            names = [node.name for node in joined.nodes()]
            plan = on(joined, "killed", names.index(extra.node_id))
            await joined.reserve([plan])
            worker = await joined.start(plan)
            await worker.ready()
            pid, raylet = await worker.call("part", "where")
            started = time.monotonic()
            for process in (raylet, pid):
                os.kill(process, signal.SIGKILL)
            fault.fired()
            with pytest.raises(WorkerDied, match="worker 'killed' died"):
                await asyncio.shield(worker.died)
            fault.detected()
            assert time.monotonic() - started < 8  # Ray declares it dead after more than 10 s
            assert extra.node_id not in [node.name for node in living_nodes()]
            await close(worker)

    try:
        asyncio.run(check())
    finally:
        cluster.remove_node(extra, allow_graceful=False)


def test_worker_dies_with_reason_when_reply_cannot_be_unpickled(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with opened(address, tmp_path, monkeypatch) as cluster:
            worker = await cluster.start(on(cluster, "odd", 0))
            await worker.ready()
            with pytest.raises(WorkerDied, match="'odd' died: ValueError: cannot be unpickled"):
                await asyncio.wait_for(worker.call("part", "unreadable"), 20)
            await close(worker)

    asyncio.run(check())


def test_ranks_are_killed_when_their_group_cannot_start(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, kill = [], RayWorker.kill

    async def never(worker: RayWorker) -> Any:
        await asyncio.Event().wait()

    def recorded(worker: RayWorker) -> None:
        killed.append(worker.name)
        kill(worker)

    monkeypatch.setattr(RayWorker, "address", never)
    monkeypatch.setattr(RayWorker, "kill", recorded)

    async def check() -> None:
        async with opened(address, tmp_path, monkeypatch) as cluster:
            with pytest.raises(WorkerDied, match="was not ready within start_timeout_s"):
                await start_worker(cluster, on(cluster, "ranks", 0, 1, ranks=2), 0.1)
            assert killed == ["ranks rank 0", "ranks rank 1"]

    asyncio.run(check())


def test_open_disconnects_when_nodes_cannot_be_read(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ConfigError("planted")

    monkeypatch.setattr(devices, "living_nodes", fail)

    async def check() -> None:
        with pytest.raises(ConfigError, match="planted"):
            async with opened(address, tmp_path, monkeypatch):
                pass

    asyncio.run(check())
    assert not ray.is_initialized()


@pytest.mark.fault("B1", "worker on Ray suspended")
@pytest.mark.fault("B2", "suspended worker on Ray wakes up")
def test_worker_is_fenced_and_can_be_replaced_when_suspended(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr(ray_worker, "SILENCE_S", 2.0)

    async def check() -> None:
        async with opened(address, tmp_path, monkeypatch) as cluster:
            worker = await cluster.start(on(cluster, "suspended", 1))
            await worker.ready()
            events: list[Any] = []
            worker.listen("part", events.append)
            pid, _ = await worker.call("part", "where")
            await worker.call("part", "tick", True)
            await wait_until(lambda: events)
            os.kill(pid, signal.SIGSTOP)
            fault.fired("B1")
            with pytest.raises(WorkerDied, match=r"worker .suspended. .*did not respond"):
                await asyncio.wait_for(asyncio.shield(worker.died), 20)
            fault.detected("B1")
            count = len(events)
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)
            with pytest.raises(WorkerDied):
                await worker.call("part", "record", 1)
            fault.fired("B2")
            assert len(events) == count, "an event of a dead worker was delivered"
            replacement = await cluster.start(on(cluster, "suspended", 1))
            await replacement.ready()
            assert await replacement.call("part", "record", 7) == 7
            fault.recovered("B1")
            await close(worker, replacement)
            await wait_until(lambda: not psutil.pid_exists(pid))

    asyncio.run(check())


def test_ranks_on_two_nodes_form_one_group(
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
            replies = [group.start_call("part", "total", number) for number in range(5)]
            assert await asyncio.gather(*replies) == [1, 3, 5, 7, 9]
            pid, _ = await group.ranks[1].call("part", "where")
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match="'train rank 1' died"):
                await asyncio.wait_for(asyncio.shield(group.died), 10)
            await group.close()

    asyncio.run(check())


def test_reserve_fails_when_devices_are_in_use(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "RESERVE_TIMEOUT_S", 1.0)

    async def check() -> None:
        async with opened(address, tmp_path, monkeypatch) as cluster:
            await cluster.reserve([on(cluster, "first", 0, 0, ranks=2)])
            with pytest.raises(ConfigError, match=r"pool 'second' waited .* they are in use"):
                await cluster.reserve([on(cluster, "second", 0)])

    asyncio.run(check())


def test_open_fails_when_no_cluster_is_at_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        with pytest.raises(ConfigError, match="cannot connect to a Ray cluster"):
            async with opened("127.0.0.1:1", tmp_path, monkeypatch):
                pass

    asyncio.run(check())


def test_new_cluster_listens_only_on_localhost_and_requires_token(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    env["HOME"] = str(tmp_path)
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
    assert found["mode"] == "token"
    assert not list(tmp_path.iterdir()), "a file was written to the home directory"


_LISTENING = """
import json, os, psutil
from paceline.workers.ray.connection import connect
connect("local")
processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
connections = [c for process in processes for c in process.net_connections("inet")]
hosts = [c.laddr.ip for c in connections if c.status == "LISTEN"]
print(json.dumps({"hosts": hosts, "mode": os.environ["RAY_AUTH_MODE"]}))
"""
