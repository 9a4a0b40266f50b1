"""Deadlines do not expire while the process is suspended."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.errors import DataError
from paceline.run import train
from paceline.suspend import SuspendAwareClock
from tests.fault_report import Fault

PROGRAM = textwrap.dedent("""
    import asyncio
    from paceline import suspend

    suspend.SUSPEND_THRESHOLD_S = 0.5

    async def main():
        suspend.ignore_suspended_time(asyncio.get_running_loop())
        suspend.ignore_suspended_time(asyncio.get_running_loop())  # a second time changes nothing
        async with asyncio.timeout(1.5):
            print("started", flush=True)
            for _ in range(5):
                await asyncio.sleep(0.05)
        print("done", flush=True)
        try:
            async with asyncio.timeout(0.2):
                await asyncio.sleep(60)
        except TimeoutError:
            print("deadlines still expire", flush=True)

    asyncio.run(main())
""")


@pytest.mark.fault("F8", "process suspended for longer than its deadline")
def test_deadline_does_not_expire_while_process_is_suspended(fault: Fault) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(2)  # longer than the deadline
        process.send_signal(signal.SIGCONT)
        fault.fired()
        assert process.stdout.read() == "done\ndeadlines still expire\n"


def test_train_gives_event_loop_suspend_aware_clock(tmp_path: Path) -> None:
    async def script() -> bool:
        with pytest.raises(DataError):
            await train(load_config(None, [f"run_dir={tmp_path}", "data.path=no/such/file.jsonl"]))
        clock = getattr(asyncio.get_running_loop().time, "__self__", None)
        return isinstance(clock, SuspendAwareClock)

    assert asyncio.run(script())


def test_clock_counts_waits_and_work_but_not_suspensions() -> None:
    seconds = iter([0.0, 1.0, 61.0, 62.5, 100.0])
    clock = SuspendAwareClock(lambda: next(seconds))
    assert clock.now() == 1.0, "the next reading"
    assert clock.now(waited=60.0) == 61.0, "a planned wait"
    assert clock.now() == 62.5, "work"
    assert clock.now() == 62.5, "37.5 seconds without a planned wait: suspended"
