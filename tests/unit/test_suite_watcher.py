"""The watcher of the guide's commands waits for nothing that can no longer come."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.suite.watcher import Watcher
from paceline.errors import PacelineError


def test_a_run_that_is_over_too_soon_to_be_paused_is_told_instead_of_waited_for(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        watcher = Watcher()
        pausing = asyncio.create_task(watcher.pause_and_resume(tmp_path, looks=2))
        await asyncio.sleep(0)
        watcher.end()
        async with asyncio.timeout(5):
            await pausing

    with pytest.raises(PacelineError, match="over before it had been paused"):
        asyncio.run(check())
