"""The watcher of the end-to-end test and the benchmark stops waiting when the run ends."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.suite.watcher import Watcher
from paceline.errors import PacelineError


def test_watcher_raises_when_run_ends_before_pause(tmp_path: Path) -> None:
    async def check() -> None:
        watcher = Watcher()
        pausing = asyncio.create_task(watcher.pause_and_resume(tmp_path, polls=2))
        await asyncio.sleep(0)
        watcher.end()
        async with asyncio.timeout(60):
            await pausing

    with pytest.raises(PacelineError, match="ended before it had been paused"):
        asyncio.run(check())
