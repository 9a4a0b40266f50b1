"""Rollout workers of a real run are killed, stopped, added and removed, and nobody who waits for the result can tell."""

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
from tests.models import random_model
from tests.processes import children

SETTINGS = [
    "steps=400",
    "groups_per_step=4",
    "group_size=4",
    "data.task=copy:3",
    "rollout.max_response_length=24",
    "placement.threads=1",
    "placement.actor=train",
    "placement.rollout=rollout",
    "data.max_prompt_length=32",
    "schedule.max_staleness=3",
    "schedule.on_sync=swap",
    "fleet.heartbeat_timeout_s=3",
    "sync.timeout_s=10",  # a worker that is stopped while it should load is silent for that long
    "train.learning_rate=1e-3",
    f"reward.function={Path(__file__).parents[1]}/rewards.py:letters",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_model(tmp_path_factory.mktemp("model"))


def config(model: str, folder: Path, *settings: str) -> RunConfig:
    return load_config(None, [f"model={model}", f"run_dir={folder}", *SETTINGS, *settings])


class Steps:
    """An observer that lets a test wait for a step, and ends the run when the test has seen enough."""

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
            raise Enough

    def engines_polled(self, *_: object) -> None:
        self._moved.set()

    async def until(self, what: Callable[[], bool]) -> None:
        while not what():
            self._moved.clear()
            await self._moved.wait()

    async def more(self, steps: int) -> None:
        goal = self.step + steps
        await self.until(lambda: self.step >= goal)


class Enough(Exception):
    pass


def play(config: RunConfig, script: Callable[[Steps], Awaitable[None]]) -> Steps:
    """Run until the script has ended, and check what must always hold."""

    async def both() -> Steps:
        steps = Steps()
        run = asyncio.ensure_future(train(config, lambda _: steps))
        acting = asyncio.ensure_future(asyncio.wait_for(script(steps), 120))
        try:
            done, _ = await asyncio.wait({run, acting}, return_when=asyncio.FIRST_COMPLETED)
            if acting in done:
                acting.result()
                steps.done = True
            with suppress(Enough):
                await run
        finally:
            acting.cancel()
            run.cancel()
            await asyncio.wait({run, acting})
        return steps

    steps = asyncio.run(both())
    assert not children(), "a process was left behind"
    check_ledger(Path(config.run_dir))
    assert max(row["staleness/max"] for row in steps.metrics) <= config.schedule.max_staleness
    return steps


def check_ledger(folder: Path) -> None:
    events = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    trained = [event["seq"] for event in events if event["event"] == "trained"]
    assert trained == list(range(len(trained))), "every prompt once, in order"
    issued = {event["seq"] for event in events if event["event"] == "issued"}
    assert set(trained) <= issued and not any(event["event"] == "dropped" for event in events)


def pids(folder: Path) -> dict[str, int]:
    """Workers write to their own log, so the open file tells who is who; of two under one name, the younger."""
    found: dict[str, int] = {}
    for process in sorted(psutil.Process().children(), key=lambda process: process.create_time()):
        target = Path(os.path.realpath(f"/proc/{process.pid}/fd/1"))
        if target.parent == (folder / "logs").resolve():
            found[target.stem] = process.pid
    return found


async def tell(folder: Path, command: str, **arguments: Any) -> Any:
    return await asyncio.to_thread(send_command, folder, command, **arguments)


async def mid_generation(folder: Path, name: str) -> None:
    """Wait until this worker has answers under way."""
    while not any(row["name"] == name and row["load"] for row in await tell(folder, "list")):
        await asyncio.sleep(0.01)


def test_the_only_rollout_worker_killed_mid_generation_is_replaced_and_its_groups_are_trained_once(
    model: str, tmp_path: Path
) -> None:
    async def script(steps: Steps) -> None:
        await steps.more(3)
        before = pids(tmp_path)["rollout"]
        await mid_generation(tmp_path, "rollout")
        os.kill(before, signal.SIGKILL)
        await steps.until(
            lambda: (
                steps.metrics[-1]["fleet/replaced"] == 1 and steps.metrics[-1]["fleet/engines"] == 1
            )
        )
        await steps.more(5)
        assert pids(tmp_path)["rollout"] != before
        assert [(row["state"], row["incarnation"]) for row in await tell(tmp_path, "list")] == [
            ("live", 1)
        ]

    play(config(model, tmp_path), script)


def test_a_stopped_worker_is_replaced_and_when_it_wakes_up_nobody_listens(
    model: str, tmp_path: Path
) -> None:
    async def script(steps: Steps) -> None:
        await steps.more(3)
        zombie = pids(tmp_path)["rollout"]
        await mid_generation(tmp_path, "rollout")
        os.kill(zombie, signal.SIGSTOP)
        while any(
            row["incarnation"] == 0 for row in await tell(tmp_path, "list")
        ):  # until its silence has been noticed
            await asyncio.sleep(0.01)
        os.kill(zombie, signal.SIGCONT)
        await steps.until(lambda: steps.metrics[-1]["fleet/fenced_messages"] > 0)
        await steps.until(
            lambda: (
                steps.metrics[-1]["fleet/replaced"] == 1 and steps.metrics[-1]["fleet/engines"] == 2
            )
        )
        await steps.more(5)
        assert (
            not psutil.pid_exists(zombie) or psutil.Process(zombie).status() == psutil.STATUS_ZOMBIE
        )

    play(config(model, tmp_path, "placement.rollout_workers=2"), script)


def test_the_only_worker_stopped_while_it_should_take_new_weights_is_replaced_before_its_answers_fail(
    model: str, tmp_path: Path
) -> None:
    async def script(steps: Steps) -> None:
        await steps.more(3)
        os.kill(
            pids(tmp_path)["rollout"], signal.SIGSTOP
        )  # the trainer goes on with what it has, and then nobody takes its weights
        await steps.until(lambda: steps.metrics[-1]["fleet/replaced"] == 1)
        await steps.more(5)

    play(
        config(model, tmp_path, "fleet.heartbeat_timeout_s=1", "rollout.generation_timeout=8"),
        script,
    )


def test_two_workers_join_and_one_leaves_every_engine_gets_every_version_and_the_job_can_be_paused(
    model: str, tmp_path: Path
) -> None:
    async def script(steps: Steps) -> None:
        await steps.more(2)
        assert await tell(tmp_path, "add", count=2) == ["rollout-1", "rollout-2"]
        await steps.until(lambda: steps.metrics[-1]["fleet/engines"] == 3)
        await mid_generation(tmp_path, "rollout")
        await tell(tmp_path, "remove", name="rollout")
        await steps.until(lambda: steps.metrics[-1]["fleet/engines"] == 2)
        await steps.more(3)
        reached = steps.step
        while not all(row["version"] > reached for row in await tell(tmp_path, "list")):
            await steps.more(1)
        rows = await tell(tmp_path, "list")
        assert {row["name"] for row in rows} == {"rollout-1", "rollout-2"} and all(
            row["state"] == "live" for row in rows
        )
        while "rollout" in pids(tmp_path):
            await asyncio.sleep(0.05)
        with pytest.raises(
            ConfigError, match="there is no rollout worker 'rollout'; there are rollout-"
        ):
            await tell(tmp_path, "remove", name="rollout")
        assert await tell(tmp_path, "pause") is True
        while any(row["tokens_per_s"] for row in await tell(tmp_path, "list")):
            await asyncio.sleep(0.1)
        assert await tell(tmp_path, "resume") is True
        await steps.more(3)

    play(config(model, tmp_path), script)


def test_a_worker_that_cannot_live_ends_the_run_by_name(model: str, tmp_path: Path) -> None:
    async def script(steps: Steps) -> None:
        await steps.more(1)
        while True:  # kill whoever comes, before it has finished an answer
            if pid := pids(tmp_path).get("rollout"):
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.05)

    with pytest.raises(
        WorkerDied,
        match=r"rollout worker 'rollout' failed 2 times in a row .* fleet\.max_restarts = 1",
    ):
        play(config(model, tmp_path, "fleet.max_restarts=1"), script)
    assert not children()
