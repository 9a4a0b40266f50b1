"""Processes of a plain reward function: deadlines, replacement, output, and no process left."""

import asyncio
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from paceline.errors import RewardError
from paceline.remote import child
from paceline.reward.reward import RewardSettings, open_reward
from tests.fault_report import Fault
from tests.processes import children
from tests.scoring import alive, in_loop, opened, run_program, score, until


@pytest.mark.parametrize("name", ["sleeping", "looping", "holding_the_gil", "suspending"])
@in_loop
@pytest.mark.fault("B5", "reward function hangs: {name}")
async def test_worker_is_killed_when_call_exceeds_deadline(
    functions: Path, name: str, fault: Fault
) -> None:
    async with opened(f"{functions}:{name}", timeout_s=0.5) as reward:
        before = reward.pids
        fault.fired()
        async with asyncio.timeout(60):
            with pytest.raises(RewardError, match=rf"{name}', prompt 'q7': no reply within 0.5 s"):
                await score(reward, "a")
        fault.detected()
        assert not alive(before[0])
        assert len(reward.pids) == 1
        fault.recovered()


@in_loop
@pytest.mark.fault("A5", "reward process killed while it scores")
async def test_group_is_scored_again_when_worker_is_killed(
    functions: Path, tmp_path: Path, fault: Fault
) -> None:
    hangs = tmp_path / "hangs"
    async with opened(f"{functions}:hanging_once", timeout_s=600) as reward:
        (before,) = reward.pids
        call = asyncio.ensure_future(score(reward, "a", hangs=str(hangs)))
        await until(hangs.exists)
        os.kill(before, signal.SIGKILL)
        fault.fired()
        assert await call == [1.0]
        fault.recovered()
        assert reward.pids != [before]


def test_deadline_excludes_time_while_run_is_suspended(functions: Path) -> None:
    program = f"""
        async def main():
            settings = RewardSettings(function={f"{functions}:slow"!r}, timeout_s=2)
            reward = await open_reward(settings, None)
            scoring = reward.score(Prompt("q", (1,), "", {{}}), [Trajectory((), "a")])
            call = asyncio.ensure_future(scoring)
            await asyncio.sleep(0.2)
            print(*reward.pids, flush=True)
            print(await call, flush=True)
            await reward.close()
    """
    with run_program(program) as parent:
        assert parent.stdout is not None
        both = [parent.pid, int(parent.stdout.readline())]
        # The suspension is longer than the timeout.
        for signal_number, seconds in ((signal.SIGSTOP, 2.5), (signal.SIGCONT, 0)):
            for pid in both:
                os.kill(pid, signal_number)
            time.sleep(seconds)
        assert parent.stdout.read() == "[1.0]\n"


@pytest.mark.skipif(
    sys.platform != "linux", reason="descendants outside the process group are found through /proc"
)
@in_loop
@pytest.mark.fault("B5", "reward function hangs with child processes")
async def test_descendants_are_killed_with_hanging_worker(
    functions: Path, tmp_path: Path, fault: Fault
) -> None:
    async with opened(f"{functions}:spawning", timeout_s=2.0) as reward:
        with pytest.raises(RewardError, match="no reply within 2 s"):
            await score(reward, "a", pids=str(tmp_path / "pids"))
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    fault.fired()
    await until(lambda: not any(alive(pid) for pid in pids))
    fault.recovered()


@pytest.mark.skipif(sys.platform != "linux", reason="descendants are found through /proc")
@pytest.mark.parametrize("name", ["daemon", "chain_of_daemons"])
@pytest.mark.parametrize("completion", ["a", "die"])
@in_loop
@pytest.mark.fault("G5", "reward function leaves a {name} behind")
async def test_daemons_of_function_are_killed(
    functions: Path, tmp_path: Path, name: str, completion: str, fault: Fault
) -> None:
    pids = tmp_path / "pids"
    async with opened(f"{functions}:{name}", timeout_s=600) as reward:
        with suppress(RewardError):
            async with asyncio.timeout(60):  # children keep the connection of a dead worker open
                await score(reward, completion, pids=str(pids))
    assert pids.read_text(), "a daemon was started"
    fault.fired()
    spec = f"{functions}:{name}"
    assert not [p for p in psutil.process_iter(["cmdline"]) if spec in (p.info["cmdline"] or ())]


@in_loop
@pytest.mark.fault("B5", "reward process suspended before a row of 1 MB")
async def test_group_is_scored_again_when_worker_is_suspended(
    functions: Path, fault: Fault
) -> None:
    async with opened(f"{functions}:good", timeout_s=0.5) as reward:
        (before,) = reward.pids
        os.kill(before, signal.SIGSTOP)
        fault.fired()
        async with asyncio.timeout(60):  # a row that does not fit into the buffer of the socket
            assert await score(reward, "ab", big="x" * 1_000_000) == [3.0]
        fault.recovered()
        assert reward.pids != [before] and not alive(before)


@in_loop
@pytest.mark.fault("B5", "process of an async reward suspended")
async def test_groups_of_async_function_are_scored_again_when_worker_is_suspended(
    functions: Path, fault: Fault
) -> None:
    async with opened(f"{functions}:mixed", timeout_s=0.5) as reward:
        os.kill(reward.pids[0], signal.SIGSTOP)
        fault.fired()
        async with asyncio.timeout(60):
            found = await asyncio.gather(*(score(reward, "a", "b") for _ in range(5)))
        assert found == [[1.0, 1.0]] * 5
        fault.recovered()


@in_loop
@pytest.mark.fault("B5", "reward function hangs 6 times")
async def test_pool_keeps_configured_number_of_workers_after_hangs(
    functions: Path, fault: Fault
) -> None:
    async with opened(f"{functions}:sometimes", timeout_s=0.2, workers=2) as reward:
        first = set(reward.pids)
        results = await asyncio.gather(
            *(score(reward, "hang") for _ in range(6)), return_exceptions=True
        )
        assert all(isinstance(r, RewardError) for r in results)
        fault.fired()
        assert len(reward.pids) == 2
        assert all(map(alive, reward.pids))
        assert not any(map(alive, first))
        assert await score(reward, "fine") == [1.0]
        fault.recovered()


@in_loop
async def test_event_loop_runs_while_reward_computes(functions: Path) -> None:
    async with opened(f"{functions}:sleeping", timeout_s=0.5) as reward:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        with pytest.raises(RewardError):
            await score(reward, "a")
        ticking.cancel()
        assert ticks > 2


@in_loop
async def test_groups_are_scored_by_all_workers(functions: Path) -> None:
    async with opened(f"{functions}:pid", workers=2) as reward:
        rewards = await asyncio.gather(*(score(reward, "a") for _ in range(40)))
        assert {int(r) for (r,) in rewards} == set(reward.pids)


@in_loop
async def test_prints_of_function_go_to_log(
    functions: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="paceline.remote.child"):
        async with opened(f"{functions}:printing") as reward:
            assert await score(reward, "a", "b") == [0.5, 0.5]
            await until(lambda: "hello from the reward" in caplog.text and "raw" in caplog.text)


@in_loop
async def test_close_lets_function_flush_its_files(functions: Path, tmp_path: Path) -> None:
    async with opened(f"{functions}:writing") as reward:
        await score(reward, "a", log=str(tmp_path / "log"))
    assert (tmp_path / "log").read_text() == "scored"


@in_loop
async def test_close_ends_call_in_flight(functions: Path) -> None:
    async with opened(f"{functions}:sleeping", timeout_s=600) as reward:
        call = asyncio.ensure_future(score(reward, "a"))
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await reward.close()
            with pytest.raises(RewardError):
                await call
    with pytest.raises(RewardError, match="closed"):
        await score(reward, "a")


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a busy worker notices only between two calls"
)
@pytest.mark.parametrize("name", ["looping", "holding_the_gil", "good"])
@in_loop
@pytest.mark.fault("A9", "program killed while its reward is {name}")
async def test_workers_end_when_parent_is_killed(functions: Path, name: str, fault: Fault) -> None:
    program = f"""
        async def main():
            settings = RewardSettings(function={f"{functions}:{name}"!r}, timeout_s=600)
            reward = await open_reward(settings, None)
            print(*reward.pids, flush=True)
            await reward.score(Prompt("q", (1,), "", {{"bonus": 1}}), [Trajectory((), "a")])
            await asyncio.sleep(600)
    """
    with run_program(program) as parent:
        assert parent.stdout is not None
        worker = int(await asyncio.to_thread(parent.stdout.readline))
        assert alive(worker)
        parent.send_signal(signal.SIGKILL)
        fault.fired()
    await until(lambda: not alive(worker))
    fault.recovered()


@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted through /proc")
@in_loop
@pytest.mark.fault("F11", "no file descriptors left for reward processes")
async def test_open_reward_raises_when_processes_cannot_be_started(
    functions: Path, fault: Fault
) -> None:
    before, limits = children(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        with pytest.raises(
            RewardError,
            match=r"my_rewards\.py:good': could not start a process in addition to \d+ others: "
            r".*Too many open files",
        ):
            await open_reward(RewardSettings(function=f"{functions}:good", workers=40), task=None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    fault.fired()
    assert children() == before


@in_loop
async def test_close_lets_all_workers_exit_concurrently(
    functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "EXIT_TIMEOUT_S", 60.0)
    async with opened(f"{functions}:meeting_at_exit", workers=2):
        pass
    assert len(list(functions.parent.glob("met.*"))) == 2


@in_loop
async def test_worker_scores_next_group_when_score_is_cancelled(functions: Path) -> None:
    async with opened(f"{functions}:slow") as reward:
        pids = reward.pids
        call = asyncio.ensure_future(score(reward, "a"))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await score(reward, "a") == [1.0]
        assert reward.pids == pids


@in_loop
async def test_close_does_not_warn_about_workers_that_it_kills(
    functions: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(f"{functions}:sleeping", timeout_s=600, workers=2) as reward:
        calls = [asyncio.ensure_future(score(reward, "a")) for _ in range(3)]
        await asyncio.sleep(0)
        await reward.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, RewardError) for result in results)
        await asyncio.sleep(0)
    assert [record.message for record in caplog.records] == []


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read through /proc")
@in_loop
async def test_peak_memory_counts_all_workers(functions: Path) -> None:
    async with opened(f"{functions}:allocating", workers=2) as reward:
        before = reward.peak_memory()
        assert before > 2 * 5e6, "an interpreter needs that much"
        await score(reward, "a")
        assert reward.peak_memory() > before + 90e6


FORGING = """
import os, stat
LINES = ["[" * 100_000, "[]", "{}", '{"ready": true, "concurrent": false}', '{"number": []}']
def score(completion, row):
    for fd in range(3, 64):
        try:
            if completion.isdigit() and stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, LINES[int(completion)].encode() + b"\\n")
        except OSError:
            pass
    return 1.0
"""


@in_loop
@pytest.mark.fault("G5", "reward function writes to its own channel")
async def test_forged_reply_is_error_of_its_group_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr(child, "EXIT_TIMEOUT_S", 0.05)  # these processes do not exit by themselves
    (tmp_path / "forging.py").write_text(FORGING)
    async with opened(f"{tmp_path}/forging.py:score", timeout_s=5) as reward:
        for line in range(5):
            with pytest.raises(RewardError):
                await score(reward, str(line))
        assert await score(reward, "a") == [1.0]
    assert "an invalid reply" in caplog.text and "Traceback" not in caplog.text
    fault.fired()


@in_loop
async def test_group_is_scored_again_when_real_time_signal_kills_worker(
    functions: Path, tmp_path: Path
) -> None:
    hangs = tmp_path / "hangs"
    async with opened(f"{functions}:hanging_once", timeout_s=600) as reward:
        call = asyncio.ensure_future(score(reward, "a", hangs=str(hangs)))
        await until(hangs.exists)
        os.kill(reward.pids[0], signal.SIGRTMIN + 1)  # which has no name
        async with asyncio.timeout(60):
            assert await call == [1.0]
