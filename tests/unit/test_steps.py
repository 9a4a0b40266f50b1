"""Iteration over the steps of a run."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from paceline.api import Steps


class RunningJob:
    """A job and its run; the test produces the steps."""

    def train(self, fresh: bool, display: bool, put: Callable[[Any], None], *_: Any) -> Any:
        self.put = put
        return self

    def when_done(self, function: Callable[[], object]) -> None:
        self.finish = function

    def end(self, request: Callable[[], object]) -> None:
        request()

    def result(self) -> None:
        pass


def test_next_call_gets_step_when_earlier_one_was_cancelled() -> None:
    job: Any = RunningJob()
    steps = Steps(job, fresh=False, display=False)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(steps), 0.05)
        job.put("step 1")
        job.put("step 2")
        job.finish()
        async with asyncio.timeout(10):
            assert [step async for step in steps] == ["step 1", "step 2"]
            assert [step async for step in steps] == []

    asyncio.run(main())
