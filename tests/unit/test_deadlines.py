"""Deadlines share one timer, and end the tasks that they belong to, as `asyncio.timeout` does."""

import asyncio

import pytest

from paceline.rollout.deadlines import Deadlines
from paceline.simulator.clock import run_virtual

NEVER_S = 1e9


def now() -> float:
    return asyncio.get_running_loop().time()


async def sleep_within(deadlines: Deadlines, limit: float, seconds: float) -> float | None:
    """Return when the deadline expired, or None if the sleep ended first."""
    try:
        with deadlines.within(limit):
            await asyncio.sleep(seconds)
    except TimeoutError:
        return now()
    return None


def test_each_deadline_expires_at_its_time() -> None:
    async def scenario() -> list[float | None]:
        deadlines = Deadlines()
        waits = [(30.0, 99.0), (10.0, 99.0), (20.0, 5.0), (10.0, 10.5), (0.0, 1.0), (40.0, 39.0)]
        return await asyncio.gather(*(sleep_within(deadlines, *wait) for wait in waits))

    assert run_virtual(scenario(), NEVER_S) == pytest.approx([30, 10, None, 10, 0, None], abs=1e-6)


def test_paused_deadline_keeps_its_seconds() -> None:
    async def scenario() -> list[float | None]:
        deadlines = Deadlines()
        early = asyncio.create_task(sleep_within(deadlines, 10.0, NEVER_S / 10))
        await asyncio.sleep(4)
        deadlines.pause()
        deadlines.pause()
        await asyncio.sleep(100)
        late = asyncio.create_task(sleep_within(deadlines, 3.0, NEVER_S / 10))  # not paused
        await asyncio.sleep(50)
        deadlines.resume()
        return [await early, await late]

    assert run_virtual(scenario(), NEVER_S) == pytest.approx([160, 107], abs=1e-6)


def test_seconds_left_count_down_unless_paused() -> None:
    async def scenario() -> list[float]:
        deadlines, found = Deadlines(), []
        with deadlines.within(10.0) as deadline:
            await asyncio.sleep(4)
            found.append(deadline.seconds_left)
            deadlines.pause()
            await asyncio.sleep(100)
            found.append(deadline.seconds_left)
        return found

    assert run_virtual(scenario(), NEVER_S) == pytest.approx([6, 6])


def test_inner_deadline_leaves_outer_one_in_effect() -> None:
    async def scenario() -> tuple[float | None, float | None]:
        deadlines = Deadlines()
        try:
            with deadlines.within(10.0):
                inner = await sleep_within(deadlines, 4.0, 99.0)
                await asyncio.sleep(99)
        except TimeoutError:
            return inner, now()
        return inner, None

    assert run_virtual(scenario(), NEVER_S) == pytest.approx((4, 10), abs=1e-6)


def test_cancelled_task_stays_cancelled_when_its_deadline_expires_too() -> None:
    async def scenario() -> bool:
        deadlines = Deadlines()
        task = asyncio.create_task(sleep_within(deadlines, 10.0, 99.0))
        await asyncio.sleep(1)
        # Both in one iteration of the loop.
        asyncio.get_running_loop().call_at(10.0, task.cancel)
        await asyncio.wait([task])
        return task.cancelled()

    assert run_virtual(scenario(), NEVER_S)


def test_error_of_context_is_raised_as_it_is() -> None:
    async def scenario() -> None:
        with Deadlines().within(1.0):
            raise ValueError("of the context")

    with pytest.raises(ValueError, match="of the context"):
        run_virtual(scenario(), NEVER_S)
