"""Hands new weights to every engine and counts versions. A version counts only when all engines have it.

Waits for: the engines (to drain, if so asked; to load). Waited for by: the trainer's coroutine, which gives tickets back after it.
"""

import asyncio
import logging
from collections.abc import Sequence

from pydantic import Field

from paceline.errors import SyncError
from paceline.rollout.engine import RolloutEngine
from paceline.rollout.rollouter import Rollouter
from paceline.settings import Settings
from paceline.sync.transport import WeightTransport
from paceline.types import OnSync

log = logging.getLogger(__name__)


class SyncSettings(Settings):
    retries: int = Field(3, ge=0)
    """How often a failed hand-over is tried again before the run ends."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest one hand-over may take."""


class ParameterSynchronizer:
    def __init__(
        self,
        transport: WeightTransport,
        engines: Sequence[RolloutEngine],
        rollouter: Rollouter,
        on_sync: OnSync,
        settings: SyncSettings | None = None,
    ) -> None:
        self.version = 0  # what the engines have
        self.retried = 0
        self.seconds: list[float] = []
        self._transport = transport
        self._engines = engines
        self._rollouter = rollouter
        self._on_sync = on_sync
        self._settings = settings or SyncSettings()

    async def sync_weights(self, version: int) -> bool:
        """Make `version` live on all engines. True when it is; raises SyncError when it cannot be."""
        if version < self.version:
            raise SyncError(f"weights of version {version} are older than version {self.version}, which the engines already have")
        clock = asyncio.get_running_loop().time
        started = clock()
        must_stop = self._on_sync is not OnSync.SWAP and not self._rollouter.paused
        if must_stop:
            await self._rollouter.pause_rollout()
        try:
            await self._hand_over(version)
        finally:
            if must_stop:
                await self._rollouter.resume_rollout()
        self.version = version
        self.seconds.append(clock() - started)
        return True

    async def _hand_over(self, version: int) -> None:
        for attempt in range(self._settings.retries + 1):
            if attempt:
                self.retried += 1
                await asyncio.sleep(0.05 * 2**attempt)
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    weights = await self._transport.publish(version)
                    await asyncio.gather(*(engine.load_weights(weights) for engine in self._engines))
                return
            except SyncError as error:
                failure: Exception = error
            except TimeoutError:
                failure = SyncError(f"no answer within sync.timeout_s = {self._settings.timeout_s:g} s")
            log.warning("hand-over of version %d failed (attempt %d): %s", version, attempt + 1, failure)
        raise SyncError(f"version {version} could not be handed over in {self._settings.retries + 1} attempts: {failure}") from failure
