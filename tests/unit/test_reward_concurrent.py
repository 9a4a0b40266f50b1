"""Processes of an async reward function: one event loop each, for all completions at a time."""

import asyncio
import time
from pathlib import Path

import pytest

from paceline.errors import ConfigError, RewardError
from paceline.reward.reward import RewardSettings, open_reward
from tests.fault_report import Fault
from tests.scoring import alive, in_loop, opened, score


@in_loop
async def test_async_function_scores_all_groups_concurrently(functions: Path) -> None:
    async with opened(f"{functions}:waiting") as reward:
        begun = time.monotonic()
        groups = await asyncio.gather(*(score(reward, *"abcdefgh") for _ in range(4)))
        assert groups == [[1.0] * 8] * 4
        assert time.monotonic() - begun < 12, "one after another they take 16 s"


@in_loop
async def test_client_made_in_constructor_works_for_every_call(functions: Path) -> None:
    async with opened(f"{functions}:Client") as reward:
        groups = [await score(reward, "a", "b"), await score(reward, "c", "d")]
        assert groups == [[1.0, 2.0], [3.0, 4.0]]


@in_loop
async def test_plain_function_may_return_coroutine(functions: Path) -> None:
    async with opened(f"{functions}:returning_coroutine") as reward:
        assert await score(reward, "a", "b") == [1.0, 1.0]


@in_loop
@pytest.mark.fault("B5", "one call of an async reward is late")
async def test_late_call_is_cancelled_without_its_neighbors(functions: Path, fault: Fault) -> None:
    async with opened(f"{functions}:mixed", timeout_s=1.5) as reward:
        pids = reward.pids
        late = asyncio.ensure_future(score(reward, "late", "fine"))
        neighbor = asyncio.ensure_future(score(reward, "fine"))
        with pytest.raises(RewardError, match=r"no reply within 1\.5 s \(reward\.timeout_s\)$"):
            await late
        fault.fired()
        assert await neighbor == [1.0]
        assert reward.pids == pids


@pytest.mark.parametrize("text", ["block", "stubborn"])
@in_loop
@pytest.mark.fault("B5", "async reward cannot be cancelled: {text}")
async def test_process_is_replaced_when_call_cannot_be_cancelled(
    functions: Path, text: str, fault: Fault
) -> None:
    async with opened(f"{functions}:mixed", timeout_s=0.5) as reward:
        (before,) = reward.pids
        fault.fired()
        with pytest.raises(RewardError, match=r"'q7': no reply within .* its process was killed"):
            await score(reward, text)
        fault.detected()
        assert not alive(before)
        assert await score(reward, "fine") == [1.0]
        fault.recovered()


@in_loop
@pytest.mark.fault("B5", "async reward blocks its event loop beside another call")
async def test_neighbors_of_blocking_call_are_scored_again(functions: Path, fault: Fault) -> None:
    async with opened(f"{functions}:mixed", timeout_s=0.5) as reward:
        blocked = asyncio.ensure_future(score(reward, "block"))
        await asyncio.sleep(0)
        neighbor = asyncio.ensure_future(score(reward, "fine", "fine"))
        with pytest.raises(RewardError, match="its process was killed"):
            await blocked
        fault.fired()
        assert await neighbor == [1.0, 1.0]
        fault.recovered()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise", r"raised ValueError: wrong \(.*my_rewards\.py:\d+\)"),
        ("cancel", "raised CancelledError"),
        ("time out", r"raised TimeoutError: judge \(.*my_rewards\.py:\d+\)"),
        ("exit", "its process ended with exit code 3"),
    ],
)
@in_loop
async def test_error_of_async_function_names_prompt_and_line(
    functions: Path, text: str, message: str
) -> None:
    async with opened(f"{functions}:mixed") as reward:
        with pytest.raises(RewardError, match=f"prompt 'q7': {message}"):
            await score(reward, text)
        assert await score(reward, "fine") == [1.0]


@in_loop
async def test_open_reward_raises_when_async_class_cannot_be_made(functions: Path) -> None:
    with pytest.raises(ConfigError, match=r"importing it raised KeyError: 'no key' \(.*:\d+\)"):
        await open_reward(RewardSettings(function=f"{functions}:Broken"), task=None)
