"""Complete runs on Ray: all modes, the same weights as without Ray, and failures of workers and
calls."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.observe.plan import plan_tables
from paceline.remote.worker import Worker
from paceline.run import train
from tests.audits import assert_consistent
from tests.fault_report import Fault
from tests.small_runs import SEPARATE, SMALL, OnStep, config, run, steps_of, weights

FAULTS = 5  # percent of Ray's calls
SPLIT = [
    "placement.actor=actor_rollout_ref_pool",
    "placement.rollout=actor_rollout_ref_pool",
    "placement.critic=critic_pool",
]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Worker]:
    """Collect the workers of a run by name when they become ready."""
    found: dict[str, Worker] = {}
    original = Worker.ready

    async def ready(worker: Worker) -> None:
        await original(worker)
        found.setdefault(worker.name, worker)

    monkeypatch.setattr(Worker, "ready", ready)
    return found


def on_ray(model: str, folder: Path, address: str, *settings: str) -> dict[str, Any]:
    return run(model, folder, "cluster=ray", f"ray.address={address}", *settings)


def workers_left() -> list[psutil.Process]:
    """Return actors that still run after a minute. Idle processes of Ray belong to the cluster."""
    hosts = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # also of a process that has ended: a zombie
            if "RayHost" in " ".join(process.cmdline()):
                hosts.append(process)
    return psutil.wait_procs(hosts, timeout=60)[1]


def trained(folder: Path) -> list[int]:
    assert_consistent(folder)
    events = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [event["seq"] for event in events if event["event"] == "trained"]


def test_run_on_ray_gives_same_weights_as_local_when_max_staleness_is_0(
    model: str, address: str, started: dict[str, Worker], tmp_path: Path
) -> None:
    on_ray(model, tmp_path / "ray", address, "steps=8", *SEPARATE, "placement.rollout_workers=2")
    assert len({worker.node for worker in started.values()}) == 2
    run(model, tmp_path / "local", "steps=8", *SEPARATE)
    assert weights(tmp_path / "local", 8) == weights(tmp_path / "ray", 8)
    assert {path.name for path in (tmp_path / "ray" / "logs").iterdir()} == {
        "main.log",
        "train.log",
        "rollout.log",
        "rollout-1.log",
    }


@pytest.mark.parametrize(
    ("name", "settings"),
    {
        "hybrid": [],
        "split": ["algorithm.name=ppo", *SPLIT],
        "one step off": [*SEPARATE, "schedule.max_staleness=1"],
        "fully async, collective": [
            *SEPARATE,
            "schedule.max_staleness=2",
            "schedule.on_sync=swap",
            "sync.transport=collective",
        ],
        "trainer over two nodes": [
            *SEPARATE,
            "schedule.max_staleness=2",
            "train.backend=fsdp",
            "placement.train_ranks=3",
        ],
    }.items(),
)
def test_run_on_ray_respects_staleness_bound_and_balances_ledger(
    name: str,
    settings: list[str],
    model: str,
    address: str,
    started: dict[str, Worker],
    tmp_path: Path,
) -> None:
    summary = on_ray(model, tmp_path, address, *settings)
    assert summary["steps"] == 4 and not summary["ledger"]["dropped"]
    bound = config(model, tmp_path, *settings).schedule.max_staleness
    assert 0 <= summary["staleness_max"] <= bound
    assert trained(tmp_path) == list(range(16)), "a prompt was lost or repeated"
    if name in ("split", "trainer over two nodes"):
        assert len({worker.node for worker in started.values()}) == 2, "one node has no worker"
    assert not workers_left(), "a worker was left behind"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.fault("A2", "rollout worker on Ray gets {how.name}")
def test_every_prompt_is_trained_once_when_worker_is_killed_or_suspended(
    how: signal.Signals,
    model: str,
    address: str,
    started: dict[str, Worker],
    tmp_path: Path,
    fault: Fault,
) -> None:
    async def send_signal() -> None:
        os.kill(await started["rollout"].call("host", "pid"), how)

    sent: list[asyncio.Future[None]] = []

    def sabotage(step: int) -> None:
        if step == 3:
            sent.append(asyncio.ensure_future(send_signal()))

    settings = [
        *SEPARATE,
        "placement.rollout_workers=2",
        "schedule.max_staleness=2",
        "schedule.on_sync=swap",
        "steps=60",
        "fleet.heartbeat_timeout_s=3",
        "rollout.generation_timeout=60",
        "save_every=0",
    ]
    chosen = config(model, tmp_path, "cluster=ray", f"ray.address={address}", *settings)
    asyncio.run(train(chosen, lambda _: OnStep(sabotage)))
    assert trained(tmp_path) == list(range(240)), "a prompt was lost or repeated"
    assert min(row["fleet/engines"] for row in steps_of(tmp_path)) == 1, (
        "no engine was ever missing"
    )
    fault.fired()
    fault.audited(tmp_path)
    assert not workers_left()


def test_run_on_new_cluster_trains_first_step_within_30_seconds(model: str, tmp_path: Path) -> None:
    started = time.time()
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    settings = [
        f"model={model}",
        f"run_dir={tmp_path / 'run'}",
        "steps=2",
        "groups_per_step=4",
        "data.task=copy:3",
        "data.limit=256",
    ]
    command = [sys.executable, "-m", "paceline", "train", "recipes/ray_async.toml", *settings]
    subprocess.run(command, env=env, check=True, timeout=120, cwd=Path(__file__).parents[2])
    first = steps_of(tmp_path / "run")[0]
    assert first["wall_time_s"] - started <= 30
    processes = subprocess.run(["ps", "axww"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in processes, "a process is still running"


@pytest.mark.fault("F5", "5 % of calls between Ray processes fail")
def test_every_prompt_is_trained_once_when_5_percent_of_calls_fail(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    """Use the fault injection of Ray: requests, replies and calls in flight are lost."""
    third = FAULTS / 3
    chances = {
        "num_failures": -1,
        "req_failure_prob": third,
        "resp_failure_prob": third,
        "in_flight_failure_prob": third,
    }
    env = os.environ | {
        "RAY_testing_rpc_failure": json.dumps({"CoreWorkerService.grpc_client.PushTask": chances})
    }
    folder = tmp_path / "run"
    settings = [
        "cluster=ray",
        f"model={model}",
        f"run_dir={folder}",
        "steps=50",
        "groups_per_step=4",
        "group_size=2",
        "data.task=copy:3",
        "data.limit=256",
        *SEPARATE,
        "schedule.max_staleness=2",
    ]
    command = [sys.executable, "-c", _LOGGED, *settings]
    done = subprocess.run(
        command,
        env=env,
        check=True,
        timeout=240,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert trained(folder) == list(range(200))
    lost = done.stderr.count("a lost call is sent again")
    assert lost >= 10, (
        f"only {lost} calls were lost: faults were not injected\n{done.stderr[-2000:]}"
    )
    ledger = json.loads((folder / "summary.json").read_text())["ledger"]
    assert ledger["issued"] == ledger["trained"] + ledger["outstanding"]
    fault.fired()
    fault.audited(folder)


_LOGGED = """
import asyncio, logging, sys
from paceline.config import load_config
from paceline.run import train
logging.basicConfig(level=logging.INFO)
asyncio.run(train(load_config(None, sys.argv[1:])))
"""


def test_stopped_run_releases_its_devices(model: str, address: str, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(step: int) -> None:
        raise Stop

    chosen = config(model, tmp_path, "cluster=ray", f"ray.address={address}", *SEPARATE)
    with pytest.raises(Stop):
        asyncio.run(train(chosen, lambda _: OnStep(stop)))
    ranks = ["train.backend=fsdp", "placement.train_ranks=3"]
    assert on_ray(model, tmp_path, address, *SEPARATE, *ranks)["steps"] == 4


@pytest.mark.fault("A13", "SIGTERM to a run on Ray")
def test_sigterm_stops_run_on_ray_and_prints_how_to_resume(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    settings = [
        f"model={model}",
        f"run_dir={tmp_path}/run",
        *SMALL,
        *SEPARATE,
        "cluster=ray",
        "steps=100000",
        "save_every=0",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "paceline", "train", "recipes/hybrid.toml", *settings],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            deadline = time.monotonic() + 240
            metrics = tmp_path / "run" / "metrics.jsonl"
            while (
                not (metrics.exists() and metrics.stat().st_size)
                and process.poll() is None
                and time.monotonic() < deadline
            ):
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            fault.fired()
            assert process.stdout is not None
            output = process.stdout.read()
            fault.detected()
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "the same command" in output and "SIGTERM received" not in output, output


def test_plan_shows_nodes_of_cluster_without_starting_workers(
    model: str, address: str, tmp_path: Path
) -> None:
    chosen = config(
        model, tmp_path, "cluster=ray", f"ray.address={address}", "algorithm.name=ppo", *SPLIT
    )
    (table, *_), warnings = asyncio.run(plan_tables(chosen))
    devices = list(table.columns[0].cells)
    assert table.title == "ray: 2 nodes, 4 CPU slots" and not warnings
    assert len({str(device).split()[0] for device in devices if device}) == 2, devices
    assert not tmp_path.joinpath("logs").exists()
