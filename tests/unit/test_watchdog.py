"""Watchdog: what counts as progress, and a thread that notices a blocked event loop."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline import watchdog
from paceline.background import Background
from paceline.errors import StalledError, WorkerDied
from paceline.remote.process import ProcessWorker
from paceline.remote.stacks import write_stacks
from paceline.remote.thread import ThreadWorker
from paceline.remote.worker import Worker
from paceline.reward.reward import reward_processes
from paceline.types import Role
from paceline.watchdog import Patience, Progress, StallMonitor, Watchdog
from paceline.workers.cluster import Node, PlannedWorker
from paceline.workers.pools import start_workers
from tests.fault_report import Fault
from tests.processes import started
from tests.scoring import opened, score, write_functions

QUIET, BUSY = Patience(10, "stall_timeout_s"), Patience(100, "rollout.episode_timeout_s")


def test_no_token_and_no_group_is_stall() -> None:
    monitor = StallMonitor(0.0)
    assert monitor.check(Progress((1,), 5), 1.0, QUIET, BUSY) is None
    assert monitor.check(Progress((1,), 5), 11.0, QUIET, BUSY) is None
    found = monitor.check(Progress((1,), 5), 11.5, QUIET, BUSY)
    assert found == "no progress for 10 s (stall_timeout_s = 10)"


def test_tokens_without_groups_are_stall_later() -> None:
    monitor = StallMonitor(0.0)
    for now in range(101):
        assert monitor.check(Progress((), now), now, QUIET, BUSY) is None
    found = monitor.check(Progress((), 101), 101, QUIET, BUSY)
    assert found == (
        "no group was finished and no step made for 101 s (rollout.episode_timeout_s = 100)"
    )


def test_time_without_expected_progress_does_not_count() -> None:
    monitor = StallMonitor(0.0)
    for now in range(1000):
        assert monitor.check(None, now, QUIET, BUSY) is None
    assert monitor.check(Progress((), 0), 1005, QUIET, BUSY) is None


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "POLL_S", 0.05)
    monkeypatch.setattr(watchdog, "WARN_S", 0.2)


@pytest.mark.fault("B7", "event loop blocked")
def test_blocked_event_loop_is_named_and_abandoned(
    quick: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    abandoned = False

    async def environment_that_blocks() -> None:
        while not abandoned:
            time.sleep(0.01)

    async def run() -> None:
        worker = ThreadWorker("actor", dict, ())
        await worker.ready()
        worker.start_call("actor", "never", ())
        worker._receive = lambda message: None  # type: ignore[method-assign]
        with Watchdog(lambda: [worker], 1.0, tmp_path):
            await environment_that_blocks()

    fault.fired()
    with pytest.raises(StalledError) as caught:
        Background(run()).result()
    fault.detected()
    abandoned = True
    message = str(caught.value)
    assert re.search(r"has been blocked for \d+ s at", message)
    assert "test_watchdog.py" in message and "in environment_that_blocks" in message
    assert "worker 'actor' has not finished actor.never for" in message
    stacks = (tmp_path / "stacks.txt").read_text()
    assert "environment_that_blocks" in stacks and "stacks.txt" in message
    assert "must not block" in caplog.text


@pytest.mark.fault("B7", "event loop blocked again and again")
def test_run_fails_when_event_loop_blocks_again_and_again(quick: None, fault: Fault) -> None:
    """Its event loop does not count the time in which it is blocked."""

    async def run() -> str:
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        check = StallMonitor(time.monotonic()).check
        with Watchdog(list, 10.0) as watching:
            limit = Patience(1, "stall_timeout_s")
            watching.watch(lambda now: check(Progress(()), now, limit, BUSY), told.set_result)
            while not told.done():
                time.sleep(0.3)
                await asyncio.sleep(0)
        return told.result()

    told = Background(run()).result()
    assert re.fullmatch(r"no progress for \d+ s \(stall_timeout_s = 1\)", told)
    fault.fired()


def test_responsive_event_loop_is_left_alone(quick: None) -> None:
    async def run() -> str:
        with Watchdog(list, 1.5):
            await asyncio.sleep(2.0)
        return "done"

    assert Background(run()).result() == "done"


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (
            signal.SIGSTOP,
            StalledError,
            r"the start took longer than start_timeout_s = 1 s; worker 'w' has not finished "
            r"part.upper for \d+ s; its process \d+ is suspended. Python stacks .*stacks.txt",
        ),
        (signal.SIGKILL, WorkerDied, "worker 'w' died .*SIGKILL"),
    ],
)
@pytest.mark.fault("A11", "worker gets {number.name} at the start")
def test_stage_of_start_fails_when_worker_is_suspended_or_killed(
    tmp_path: Path, number: signal.Signals, error: type[Exception], message: str, fault: Fault
) -> None:
    async def start() -> str:
        async with started(dict, tmp_path / "worker.log", {"part": "a"}, name="w") as worker:
            watching = Watchdog(lambda: [worker], 100.0, tmp_path)
            limit = Patience(60.0, "start_timeout_s")
            assert await watching.within(limit, "x", worker.call("part", "upper")) == "A"
            assert worker.pid
            os.kill(worker.pid, number)
            fault.fired()
            limit = Patience(1.0, "start_timeout_s")
            try:
                return await watching.within(limit, "the start", worker.call("part", "upper"))
            finally:
                worker.kill()  # to close a suspended worker takes seconds

    with pytest.raises(error, match=message):
        asyncio.run(start())
    fault.detected()
    if number == signal.SIGSTOP:
        assert "no reply; it is suspended" in (tmp_path / "stacks.txt").read_text()


class SlowCluster:
    """Cluster whose workers never finish their start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def nodes(self) -> list[Node]:
        return []

    async def reserve(self, plans: Sequence[PlannedWorker]) -> None:
        return

    async def start(self, plan: PlannedWorker) -> Worker:
        log = self._folder / "worker.log"
        return ProcessWorker(plan.name, time.sleep, (1000,), cores=[], threads=1, log_path=log)

    def launcher(self) -> None:
        return None

    async def close(self) -> None:
        return


@pytest.mark.fault("B7", "worker never gets ready")
def test_worker_that_never_gets_ready_is_named_with_its_stack(tmp_path: Path, fault: Fault) -> None:
    plans = [PlannedWorker("w", (Role.ROLLOUT,))]
    with pytest.raises(
        WorkerDied,
        match=r"not all workers were ready within start_timeout_s = 1 s; "
        r"worker 'w' has not finished start for \d+ s",
    ):
        asyncio.run(start_workers(SlowCluster(tmp_path), plans, 1.0, tmp_path))
    fault.fired()
    assert "worker 'w', process" in (tmp_path / "stacks.txt").read_text()


@pytest.mark.parametrize("function", ["sleeping", "holding_the_gil"])
def test_stacks_name_line_of_reward_function_that_hangs(function: str, tmp_path: Path) -> None:
    file, path = write_functions(tmp_path), tmp_path / "stacks.txt"

    async def run() -> None:
        async with opened(f"{file}:{function}", timeout_s=600) as reward:
            scoring = asyncio.ensure_future(score(reward, "a"))
            text = ""
            while f"in {function}" not in text:  # the call may not have arrived yet
                path.unlink(missing_ok=True)
                await asyncio.to_thread(write_stacks, path, "a", [], reward_processes(reward))
                text = path.read_text()
            assert f"reward '{file}:{function}', process {reward.pids[0]}:" in text
            scoring.cancel()

    asyncio.run(asyncio.wait_for(run(), 240))
