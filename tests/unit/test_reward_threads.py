"""Reward functions of the program: deadlines, threads that hang, and an interpreter that exits."""

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paceline.errors import ConfigError, RewardError
from paceline.reward.reward import Reward, RewardSettings, open_reward
from paceline.reward.threads import MAX_THREADS, CallableReward
from tests.exceptions import Panic, Speechless
from tests.fault_report import Fault
from tests.scoring import in_loop, run_program, score, until

Row = Mapping[str, Any]
HANGING = threading.Event()  # set by the functions below when they begin to hang


@asynccontextmanager
async def opened(function: Any, timeout_s: float = 20.0) -> AsyncIterator[Reward]:
    reward = await open_reward(RewardSettings(timeout_s=timeout_s), None, function)
    try:
        yield reward
    finally:
        begun = time.monotonic()
        await reward.close()
        assert time.monotonic() - begun < 30, "it waited for a function that hangs"


@pytest.fixture(autouse=True)
def nothing_hangs() -> None:
    HANGING.clear()


def sleeping(completion: str, row: Row) -> float:
    if completion != "fine":
        HANGING.set()
        time.sleep(1000)
    return 1.0


def looping(completion: str, row: Row) -> float:
    while completion != "fine":
        pass
    return 1.0


async def waiting(completion: str, row: Row) -> float:
    if completion != "fine":
        HANGING.set()
        await asyncio.sleep(1000)
    return 1.0


async def blocking(completion: str, row: Row) -> float:
    return looping(completion, row)


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


@in_loop
async def test_callable_reward_may_be_async() -> None:
    async def scorer(completion: str, row: Row) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"reward": len(completion), "bonus": row["bonus"]}

    async with opened(scorer) as reward:
        assert await score(reward, "a", "bb") == [
            {"reward": 1.0, "bonus": 1.0},
            {"reward": 2.0, "bonus": 1.0},
        ]


def panics(completion: str, row: Row) -> float:
    raise Panic("index out of bounds")


def interrupted(completion: str, row: Row) -> float:
    raise KeyboardInterrupt


def cancelled(completion: str, row: Row) -> float:
    raise asyncio.CancelledError


def speechless(completion: str, row: Row) -> float:
    raise Speechless


async def panics_async(completion: str, row: Row) -> float:
    raise Panic("index out of bounds")


async def interrupted_async(completion: str, row: Row) -> float:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (panics, "Panic: index out of bounds"),
        (speechless, "Speechless: .its text cannot be shown"),
        (interrupted, "KeyboardInterrupt"),
        (cancelled, "CancelledError"),
        (panics_async, "Panic: index out of bounds"),
        (interrupted_async, "KeyboardInterrupt"),
    ],
)
@in_loop
async def test_score_names_exception_of_any_class(function: Any, name: str) -> None:
    async with opened(function) as reward:
        with pytest.raises(RewardError, match=rf"raised {name}.*test_reward_threads\.py"):
            await score(reward, "a", "b")


@pytest.mark.parametrize("asynchronous", [False, True])
@in_loop
async def test_function_may_change_its_row(asynchronous: bool) -> None:
    def change(completion: str, row: dict[str, Any]) -> float:
        return float(row.pop("bonus"))

    async def change_async(completion: str, row: dict[str, Any]) -> float:
        return change(completion, row)

    async with opened(change_async if asynchronous else change) as reward:
        assert await score(reward, "a", "b") == [1.0, 1.0]
        assert await score(reward, "a", "b") == [1.0, 1.0]


@in_loop
async def test_callable_reward_takes_precedence_over_settings() -> None:
    def inverse(completion: str, row: Row) -> float:
        return 1 / len(completion)

    reward = await open_reward(RewardSettings(function="exact"), None, inverse)
    assert await score(reward, "ab") == [0.5]
    with pytest.raises(RewardError, match=r"inverse', prompt .*raised ZeroDivisionError"):
        await score(reward, "")
    await reward.close()


@pytest.mark.parametrize("function", [sleeping, looping, waiting, blocking])
@in_loop
@pytest.mark.fault("B5", "reward function of the program hangs: {function.__name__}")
async def test_score_raises_when_function_exceeds_deadline(function: Any, fault: Fault) -> None:
    async with opened(function, timeout_s=1.0) as reward:
        message = rf"{function.__name__}', prompt 'q7': no reply within 1 s \(reward\.timeout_s"
        fault.fired()
        with pytest.raises(RewardError, match=message):
            await score(reward, "fine", "hang")
        fault.detected()
        assert await score(reward, "fine") == [1.0]
        fault.recovered()


@pytest.mark.parametrize("function", [looping, blocking])
@in_loop
async def test_abandoned_thread_ends_when_it_runs_python_code(function: Any) -> None:
    name = "reward-loop" if function is blocking else "reward"
    before = threads(name)
    async with opened(function, timeout_s=0.3) as reward:
        with pytest.raises(RewardError):
            await score(reward, "hang")
    await until(lambda: threads(name) <= before)


@in_loop
async def test_deadline_excludes_time_in_line() -> None:
    def slow(completion: str, row: Row) -> float:
        time.sleep(0.4)
        return 1.0

    count = 6 * MAX_THREADS  # the last ones start after two seconds
    async with opened(slow, timeout_s=1.8) as reward:
        assert await score(reward, *"a" * count) == [1.0] * count


@in_loop
@pytest.mark.fault("B5", "reward function of the program hangs on every thread")
async def test_hung_threads_do_not_occupy_pool(fault: Fault) -> None:
    async with opened(sleeping, timeout_s=1.0) as reward:
        hung = [score(reward, "hang") for _ in range(MAX_THREADS)]
        results = await asyncio.gather(*hung, score(reward, "fine"), return_exceptions=True)
        assert all(isinstance(result, RewardError) for result in results[:-1])
        fault.fired()
        assert results[-1] == [1.0]


@in_loop
async def test_async_function_that_blocks_does_not_block_run() -> None:
    async with opened(blocking, timeout_s=0.3) as reward:
        call = asyncio.ensure_future(score(reward, "hang"))
        ticks = 0
        while not call.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert ticks > 2
        with pytest.raises(RewardError):
            await call


@in_loop
async def test_neighbors_of_blocking_call_are_scored_in_new_loop() -> None:
    async with opened(blocking, timeout_s=0.5) as reward:
        blocked = asyncio.ensure_future(score(reward, "hang"))
        await asyncio.sleep(0)
        neighbor = asyncio.ensure_future(score(reward, "fine", "fine"))
        with pytest.raises(RewardError):
            await blocked
        assert await neighbor == [1.0, 1.0]


@pytest.mark.parametrize("function", [sleeping, waiting])
@in_loop
async def test_score_can_be_cancelled(function: Any) -> None:
    async with opened(function) as reward:
        call = asyncio.ensure_future(score(reward, "hang"))
        await until(HANGING.is_set)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await score(reward, "fine") == [1.0]


@in_loop
async def test_cancelled_async_function_is_cancelled_too() -> None:
    ended: list[str] = []

    async def watched(completion: str, row: Row) -> float:
        ended.append("started")
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("ended")
        return 1.0

    async with opened(watched) as reward:
        call = asyncio.ensure_future(score(reward, "a"))
        await until(lambda: ended == ["started"])
        call.cancel()
        await until(lambda: ended == ["started", "ended"])


@pytest.mark.parametrize("function", [sleeping, waiting])
@in_loop
async def test_close_fails_calls_in_flight(function: Any) -> None:
    async with opened(function) as reward:
        call = asyncio.ensure_future(score(reward, "hang"))
        await until(HANGING.is_set)
        await reward.close()
        with pytest.raises(RewardError, match="closed"):
            await call


@in_loop
async def test_callable_reward_may_be_class_whose_instance_is_async() -> None:
    class Client:
        def __init__(self) -> None:
            self.loop, self.seen = asyncio.get_running_loop(), 0

        async def __call__(self, completion: str, row: Row) -> float:
            assert asyncio.get_running_loop() is self.loop
            self.seen += 1
            return self.seen

    async with opened(Client) as reward:
        assert [await score(reward, "a"), await score(reward, "b")] == [[1.0], [2.0]]


class NeedsModel:
    def __init__(self, model: str) -> None:
        self.model = model

    def __call__(self, completion: str, row: Row) -> float:
        return 1.0


@in_loop
async def test_class_is_rejected_when_it_needs_arguments() -> None:
    with pytest.raises(ConfigError, match=r"NeedsModel\(\) raised TypeError.*pass an instance"):
        await open_reward(RewardSettings(), None, NeedsModel)


class Object:
    async def score(self, prompt: Any, trajectories: Any) -> list[float]:
        return [1.0 for _ in trajectories]

    async def close(self) -> None: ...


@in_loop
async def test_class_is_rejected_when_it_has_no_call() -> None:
    with pytest.raises(ConfigError, match=r"Object has no method __call__; .*an instance"):
        await open_reward(RewardSettings(), None, Object)  # type: ignore[arg-type]


@in_loop
async def test_function_that_sets_signal_is_referred_to_file() -> None:
    def limited(completion: str, row: Row) -> float:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return 1.0

    async with opened(limited) as reward:
        with pytest.raises(RewardError, match=r"main thread.*reward='file\.py:function'"):
            await score(reward, "a")


@in_loop
async def test_callable_reward_may_be_lambda_that_returns_coroutine() -> None:
    async with opened(lambda completion, row: waiting(completion, row)) as reward:
        assert await score(reward, "fine", "fine") == [1.0, 1.0]


@in_loop
async def test_callable_reward_of_another_library_is_rejected() -> None:
    def for_trl(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0]

    with pytest.raises(ConfigError, match=r"for_trl.* is written for TRL; .* Wrap it"):
        await open_reward(RewardSettings(), None, for_trl)


@in_loop
async def test_call_is_forgotten_when_it_is_cancelled_before_it_begins() -> None:
    held, released = threading.Event(), threading.Event()

    async def holding(completion: str, row: Row) -> float:
        if completion == "hold":
            held.set()
            released.wait()  # blocks the event loop of the functions
        return 1.0

    async with opened(holding) as reward:
        assert isinstance(reward, CallableReward)
        first = asyncio.ensure_future(score(reward, "hold"))
        await until(held.is_set)
        thread = reward._loop._thread
        assert thread is not None
        second = asyncio.ensure_future(score(reward, "fine"))
        await until(lambda: len(thread._calls) == 2)
        second.cancel()
        await asyncio.wait([second])
        released.set()
        assert await first == [1.0]
        await until(lambda: not thread._calls)
        assert not thread.abandoned


PROGRAM = """
    def hang(completion, row):
        print("hanging", flush=True)
        time.sleep(1000)

    async def hang_async(completion, row):
        hang(completion, row)

    async def main():
        reward = await open_reward(RewardSettings(timeout_s={timeout_s}), None, {name})
        try:
            await reward.score(Prompt("q7", (1,), "", {{}}), [Trajectory((), "a")])
        finally:
            await reward.close()
"""


@pytest.mark.parametrize("name", ["hang", "hang_async"])
def test_program_ends_with_reward_error_when_function_sleeps(name: str) -> None:
    with run_program(PROGRAM.format(name=name, timeout_s=1.0), stderr=-1) as program:
        _, errors = program.communicate(timeout=120)
    assert program.returncode == 1
    assert "RewardError: reward" in errors and "no reply within 1 s (reward.timeout_s)" in errors


@pytest.mark.parametrize("name", ["hang", "hang_async"])
def test_program_ends_on_interrupt_when_function_sleeps(name: str) -> None:
    with run_program(PROGRAM.format(name=name, timeout_s=600.0), stderr=-1) as program:
        assert program.stdout is not None and program.stdout.readline() == "hanging\n"
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=120)
    assert "KeyboardInterrupt" in errors


SUSPENDED = """
    from paceline import suspend

    suspend.SUSPEND_THRESHOLD_S = 0.3

    def slow(completion, row):
        print("started", flush=True)
        for _ in range(5):
            time.sleep(0.1)
        return 1.0

    async def main():
        reward = await open_reward(RewardSettings(timeout_s=1.5), None, slow)
        print(await reward.score(Prompt("q7", (1,), "", {}), [Trajectory((), "a")]), flush=True)
        await reward.close()
"""


def test_deadline_excludes_time_while_program_is_suspended() -> None:
    with run_program(SUSPENDED) as program:
        assert program.stdout is not None and program.stdout.readline() == "started\n"
        program.send_signal(signal.SIGSTOP)
        time.sleep(1.8)  # longer than the deadline
        program.send_signal(signal.SIGCONT)
        assert program.stdout.read() == "[1.0]\n"
