"""Torch profiles of chosen train steps: tells every worker when to start and to stop recording."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.remote.worker import Worker, mark_seen

log = logging.getLogger(__name__)

PART = "profiler"
TIMEOUT_S = 120.0  # for the workers to write their files


class StepProfile:
    """Watches the steps of a run. Workers record from the end of step `first - 1` on."""

    def __init__(
        self, steps: range, run_dir: Path, workers: Callable[[], Iterable[Worker]], done: int = 0
    ) -> None:
        """`done`: steps that a resumed run has made before."""
        self._steps, self._folder, self._workers = steps, run_dir / "profile", workers
        self._recording: list[Worker] = []
        self._written: list[asyncio.Future[Any]] = []
        self.step_done(done)

    def step_done(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        if step + 1 == self._steps.start:
            living = (worker for worker in self._workers() if not worker.died.done())
            self._recording = list({id(worker): worker for worker in living}.values())
            for worker in self._recording:
                mark_seen(worker.start_call(PART, "start"))
        elif step + 1 == self._steps.stop:
            self._stop()

    async def close(self) -> None:
        """Stop if the run ends early, and wait for the files."""
        self._stop()
        if not self._written:
            log.warning(
                "profile_steps: this run did not train step %d, the first of steps %s, so it "
                "recorded none of them",
                self._steps.start,
                self._span,
            )
            return
        done, late = await asyncio.wait(self._written, timeout=TIMEOUT_S)
        failed = [reply for reply in done if reply.cancelled() or reply.exception()]
        if late or failed:
            log.warning("%d torch profiles were not written", len(late) + len(failed))
        else:
            log.info("torch profiles of steps %s are in %s", self._span, self._folder)

    @property
    def _span(self) -> str:
        return f"{self._steps.start}-{self._steps.stop - 1}"

    def _stop(self) -> None:
        for worker in self._recording:
            if not worker.died.done():
                path = self._folder.absolute() / f"{worker.name}_steps_{self._span}.json.gz"
                self._written.append(mark_seen(worker.start_call(PART, "stop", str(path))))
        self._recording = []
