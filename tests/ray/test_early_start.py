"""Early start on Ray: worker processes that start before the run has loaded its libraries."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import ray

from paceline.config import load_config
from paceline.errors import ConfigError
from paceline.observe.recorder import write_json
from paceline.settings import with_settings
from paceline.workers.cluster import Device, Node, PlannedWorker
from paceline.workers.ray import joining
from tests.ray.test_workers import close, on, opened, wait_until


def planned(nodes: Sequence[Node]) -> list[PlannedWorker]:
    return [PlannedWorker("early", (), pool="early", devices=(Device(nodes[0].name, 0),))]


def hosts() -> list[psutil.Process]:
    below = psutil.Process().children(recursive=True)
    return [process for process in below if "RayHost" in " ".join(process.cmdline())]


def test_run_gives_work_to_processes_that_started_early(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        joining.start_early(address, planned)
        nodes = await joining.find_ray_nodes(address)
        assert ray.is_initialized(), "the nodes are known from the early start"
        async with opened(address, tmp_path, monkeypatch) as cluster:
            assert cluster.nodes() == nodes
            await wait_until(hosts)
            (process,) = hosts()
            (plan,) = planned(cluster.nodes())
            await cluster.reserve([plan])
            worker = await cluster.start(plan)
            await worker.ready()
            assert (await worker.call("part", "where"))[0] == process.pid
            replacement = await cluster.start(plan)  # a process that was used is not used again
            await replacement.ready()
            assert (await replacement.call("part", "where"))[0] != process.pid
            await close(worker, replacement)

    asyncio.run(check())


def test_processes_that_started_early_end_when_plan_differs(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        joining.start_early(address, planned)
        async with opened(address, tmp_path, monkeypatch) as cluster:
            await wait_until(hosts)
            early = hosts()
            plans = [on(cluster, "all", 0, 0, 1, 1, ranks=4)]  # all devices, so none stays reserved
            await cluster.reserve(plans)
            assert not psutil.wait_procs(early, timeout=20)[1]

    asyncio.run(check())


def test_run_starts_as_usual_when_early_start_fails(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Sequence[Node]) -> list[PlannedWorker]:
        raise ConfigError("planted")

    async def check() -> None:
        joining.start_early(address, fail)
        async with opened(address, tmp_path, monkeypatch) as cluster:
            worker = await cluster.start(on(cluster, "usual", 0))
            await worker.ready()
            await close(worker)

    asyncio.run(check())


def test_early_start_plans_with_settings_of_last_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[PlannedWorker] = []
    monkeypatch.setattr(
        joining, "start_early", lambda _, plan: found.extend(plan([Node("one", cpus=2)]))
    )
    config = load_config(None, ["cluster=ray", f"run_dir={tmp_path}", "placement.rollout=other"])
    before = with_settings(config, {"placement.threads": 7})
    write_json(tmp_path / "settings.json", before.model_dump(mode="json"))
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)  # it is not read
    joining.start_last_workers(config)
    assert [plan.threads for plan in found] == [7, 7]


def test_early_start_does_not_wait_for_torch() -> None:
    program = "import sys, paceline.workers.ray.joining; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
