"""Real runs whose rollout workers are killed, suspended, added and removed."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.config import RunConfig, load_config
from paceline.control import send_command
from paceline.errors import ConfigError, WorkerDied
from paceline.run import train
from tests.audits import assert_consistent
from tests.fault_report import Fault
from tests.processes import children, worker_pids

SETTINGS = [
    "steps=400",
    "groups_per_step=4",
    "group_size=4",
    "data.task=copy:3",
    "data.limit=256",
    "rollout.max_response_length=24",
    "placement.threads=1",
    "placement.actor=train",
    "placement.rollout=rollout",
    "data.max_prompt_length=32",
    "schedule.max_staleness=3",
    "schedule.on_sync=swap",
    "fleet.heartbeat_timeout_s=3",
    "sync.timeout_s=10",  # heartbeat timeout of a worker that is loading weights
    "train.learning_rate=1e-3",
    f"reward.function={Path(__file__).parents[1]}/rewards.py:letters",
]


def config(model: str, run_dir: Path, *settings: str) -> RunConfig:
    return load_config(None, [f"model={model}", f"run_dir={run_dir}", *SETTINGS, *settings])


class Steps:
    """Observer with which a test waits for a step, and which ends the run when the test is done."""

    def __init__(self) -> None:
        self.step = 0
        self.metrics: list[dict[str, float]] = []
        self.done = False
        self._moved = asyncio.Event()

    def step_done(self, step: int, metrics: dict[str, float], groups: Sequence[Any]) -> None:
        self.step = step
        self.metrics.append(metrics)
        self._moved.set()
        if self.done:
            raise ScriptDone

    def engines_polled(self, *_: object) -> None:
        self._moved.set()

    async def until(self, what: Callable[[], bool]) -> None:
        while not what():
            self._moved.clear()
            await self._moved.wait()

    async def more(self, steps: int) -> None:
        goal = self.step + steps
        await self.until(lambda: self.step >= goal)


class ScriptDone(Exception):
    pass


def play(config: RunConfig, script: Callable[[Steps], Awaitable[None]]) -> Steps:
    """Run until the script has ended, then check the invariants of a run."""

    async def both() -> Steps:
        steps = Steps()
        run = asyncio.ensure_future(train(config, lambda _: steps))
        acting = asyncio.ensure_future(asyncio.wait_for(script(steps), 240))
        try:
            done, _ = await asyncio.wait({run, acting}, return_when=asyncio.FIRST_COMPLETED)
            if acting in done:
                if acting.exception():  # perhaps because the run is ending with an error
                    await asyncio.wait({run}, timeout=30)
                    if run.done():
                        run.result()
                acting.result()
                steps.done = True
            with suppress(ScriptDone):
                await run
        finally:
            acting.cancel()
            run.cancel()
            await asyncio.wait({run, acting})
        return steps

    steps = asyncio.run(both())
    assert not children(), "a process is left over"
    check_ledger(Path(config.run_dir))
    assert_consistent(Path(config.run_dir))
    assert max(row["staleness/max"] for row in steps.metrics) <= config.schedule.max_staleness
    return steps


def check_ledger(run_dir: Path) -> None:
    events = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    trained = [event["seq"] for event in events if event["event"] == "trained"]
    assert trained == list(range(len(trained))), "every prompt once, in order"
    issued = {event["seq"] for event in events if event["event"] == "issued"}
    assert set(trained) <= issued and not any(event["event"] == "dropped" for event in events)


async def command(run_dir: Path, name: str, /, **arguments: Any) -> Any:
    return await asyncio.to_thread(send_command, run_dir, name, **arguments)


async def mid_generation(run_dir: Path, name: str) -> None:
    """Wait until this worker has trajectories in flight."""
    while not any(row["name"] == name and row["load"] for row in await command(run_dir, "list")):
        await asyncio.sleep(0.01)


@pytest.mark.fault("A2", "rollout worker killed during generation")
def test_fleet_replaces_worker_when_killed_during_generation(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    async def script(steps: Steps) -> None:
        await steps.more(3)
        before = worker_pids(tmp_path)["rollout"]
        await mid_generation(tmp_path, "rollout")
        os.kill(before, signal.SIGKILL)
        fault.fired()
        await steps.until(
            lambda: (
                steps.metrics[-1]["fleet/replaced"] == 1 and steps.metrics[-1]["fleet/engines"] == 1
            )
        )
        fault.recovered()
        await steps.more(5)
        assert worker_pids(tmp_path)["rollout"] != before
        assert [(row["state"], row["incarnation"]) for row in await command(tmp_path, "list")] == [
            ("live", 1)
        ]

    play(config(model, tmp_path), script)
    fault.audited(tmp_path)


@pytest.mark.slow
@pytest.mark.fault("A1", "idle rollout worker killed")
def test_fleet_replaces_worker_when_killed_while_idle(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    async def script(steps: Steps) -> None:
        await steps.more(2)
        await command(tmp_path, "pause")
        while any(row["tokens_per_s"] for row in await command(tmp_path, "list")):
            await asyncio.sleep(0.1)
        os.kill(worker_pids(tmp_path)["rollout"], signal.SIGKILL)
        fault.fired()
        while [row["incarnation"] for row in await command(tmp_path, "list")] != [1]:
            await asyncio.sleep(0.05)
        fault.detected()
        await command(tmp_path, "resume")
        await steps.until(lambda: steps.metrics[-1]["fleet/replaced"] == 1)
        fault.recovered()
        await steps.more(3)

    play(config(model, tmp_path), script)
    fault.audited(tmp_path)


@pytest.mark.slow
@pytest.mark.fault("B3", "trainer suspended for less than its deadline")
def test_run_keeps_staleness_bound_when_trainer_is_suspended(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    async def script(steps: Steps) -> None:
        await steps.more(2)
        trainer = psutil.Process(worker_pids(tmp_path)["train"])
        trainer.suspend()
        # The engine generates until every ticket is taken, and then waits.
        while any(row["load"] for row in await command(tmp_path, "list")):
            await asyncio.sleep(0.1)
        assert trainer.status() == psutil.STATUS_STOPPED
        trainer.resume()
        fault.fired()
        await steps.more(3)
        fault.recovered()

    play(config(model, tmp_path), script)  # checks the bound in ledger and metrics
    fault.audited(tmp_path)


@pytest.mark.fault("B1", "rollout worker suspended for longer than its heartbeat timeout")
@pytest.mark.fault("B2", "suspended rollout worker wakes up after it was replaced")
def test_fleet_replaces_suspended_worker_and_discards_its_messages(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    async def script(steps: Steps) -> None:
        await steps.more(3)
        suspended = worker_pids(tmp_path)["rollout"]
        await mid_generation(tmp_path, "rollout")
        os.kill(suspended, signal.SIGSTOP)
        fault.fired("B1")
        # Wait until the heartbeat timeout has passed.
        while any(row["incarnation"] == 0 for row in await command(tmp_path, "list")):
            await asyncio.sleep(0.01)
        fault.detected("B1")
        os.kill(suspended, signal.SIGCONT)
        fault.fired("B2")
        await steps.until(lambda: steps.metrics[-1]["fleet/fenced_messages"] > 0)
        fault.detected("B2")
        await steps.until(
            lambda: (
                steps.metrics[-1]["fleet/replaced"] == 1 and steps.metrics[-1]["fleet/engines"] == 2
            )
        )
        fault.recovered()
        await steps.more(5)
        if psutil.pid_exists(suspended):
            assert psutil.Process(suspended).status() == psutil.STATUS_ZOMBIE

    play(config(model, tmp_path, "placement.rollout_workers=2"), script)
    fault.audited(tmp_path)


@pytest.mark.fault("A4", "rollout worker suspended before a weight sync")
def test_fleet_replaces_worker_when_suspended_during_weight_sync(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    async def script(steps: Steps) -> None:
        await steps.more(3)
        # The trainer continues with the queued groups; then no engine loads its weights.
        os.kill(worker_pids(tmp_path)["rollout"], signal.SIGSTOP)
        fault.fired()
        # A busy machine may miss a heartbeat once more.
        await steps.until(lambda: steps.metrics[-1]["fleet/replaced"] >= 1)
        fault.recovered()
        await steps.more(5)

    play(
        config(
            model,
            tmp_path,
            "fleet.heartbeat_timeout_s=2",
            "sync.timeout_s=5",
            "rollout.generation_timeout=8",
        ),
        script,
    )


def test_workers_can_be_added_and_removed(model: str, tmp_path: Path) -> None:
    async def script(steps: Steps) -> None:
        await steps.more(2)
        assert await command(tmp_path, "add", count=2) == ["rollout-1", "rollout-2"]
        await steps.until(lambda: steps.metrics[-1]["fleet/engines"] == 3)
        await mid_generation(tmp_path, "rollout")
        await command(tmp_path, "remove", name="rollout")
        await steps.until(lambda: steps.metrics[-1]["fleet/engines"] == 2)
        await steps.more(3)
        reached = steps.step
        while not all(row["version"] > reached for row in await command(tmp_path, "list")):
            await steps.more(1)
        rows = await command(tmp_path, "list")
        assert {row["name"] for row in rows} == {"rollout-1", "rollout-2"}
        assert all(row["state"] == "live" for row in rows)
        while "rollout" in worker_pids(tmp_path):
            await asyncio.sleep(0.05)
        with pytest.raises(
            ConfigError, match="there is no rollout worker 'rollout'; expected one of rollout-"
        ):
            await command(tmp_path, "remove", name="rollout")

    play(config(model, tmp_path), script)


def test_run_can_be_paused_and_resumed(model: str, tmp_path: Path) -> None:
    async def script(steps: Steps) -> None:
        await steps.more(2)
        assert await command(tmp_path, "pause") is True
        while any(row["tokens_per_s"] for row in await command(tmp_path, "list")):
            await asyncio.sleep(0.1)
        assert await command(tmp_path, "resume") is True
        await steps.more(3)

    # On a thread, because commands do not depend on where workers run.
    play(config(model, tmp_path, "placement.rollout=train"), script)


@pytest.mark.fault("A1", "rollout worker and its replacement killed")
def test_run_fails_when_worker_exceeds_max_restarts(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    async def script(steps: Steps) -> None:
        await steps.more(1)
        while True:  # kill each replacement before it finishes a completion
            if pid := worker_pids(tmp_path).get("rollout"):
                os.kill(pid, signal.SIGKILL)
                fault.fired()
            await asyncio.sleep(0.05)

    with pytest.raises(
        WorkerDied,
        match=r"rollout worker 'rollout' failed 2 times in a row .*\(fleet\.max_restarts = 1\)",
    ):
        play(config(model, tmp_path, "fleet.max_restarts=1"), script)
    fault.detected()
    assert not children()
    assert_consistent(tmp_path)
    fault.audited(tmp_path)
