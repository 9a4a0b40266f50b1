"""Hands new weights to the engines and counts versions. A version counts when every engine in rotation has it.

An engine that fails or is late is out of rotation, so that nobody waits for it: it gets no new work until it has caught up by itself.
What it is generating goes on, since it was admitted under an older version, for which its weights are new enough.

Waits for: the engines (to drain, if so asked; to load). Waited for by: the trainer's coroutine, which gives tickets back after it.
"""

import asyncio
import logging
from collections.abc import Collection
from typing import Literal

from pydantic import Field

from paceline.errors import PacelineError, SyncError, WorkerDied
from paceline.notifier import Notifier
from paceline.rollout.fleet import Fleet
from paceline.rollout.member import Member, State
from paceline.rollout.rollouter import Rollouter
from paceline.settings import Settings
from paceline.sync.transport import WeightTransport
from paceline.sync.weights import Weights
from paceline.types import OnSync

log = logging.getLogger(__name__)

BACK_OFF_S = 0.1  # before the first retry; doubles from there


class SyncSettings(Settings):
    mismatch_limit: float | None = Field(None, gt=0)
    """Mean distance of the engine's and the trainer's log-probs, of the same version, that ends the run. Unset: by `train.dtype`."""
    transport: Literal["auto", "stream", "collective"] = "auto"
    """How weights reach engines in other workers: over TCP, by broadcast (NCCL or gloo), or what suits the cluster: shared memory on one
    machine, else a broadcast between GPUs and a stream between CPUs."""
    retries: int = Field(3, ge=0)
    """How often a failed hand-over is tried again before the run ends (or the one engine that fails is replaced)."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest one hand-over may take."""
    straggler_timeout_s: float = Field(5.0, gt=0)
    """How long the other engines are waited for once one has the new weights; a later one is out of rotation until it has them."""


class ParameterSynchronizer:
    def __init__(
        self,
        transport: WeightTransport,
        fleet: Fleet,
        rollouter: Rollouter,
        on_sync: OnSync,
        settings: SyncSettings | None = None,
        shares_weights: bool = False,
    ) -> None:
        """`lent`: the engine computes with the trainer's very own weights, which a train step changes."""
        self.version = 0  # what every engine in rotation has
        self.retried = 0
        self.seconds: list[float] = []
        self._transport = transport
        self._fleet = fleet
        self._rollouter = rollouter
        self._on_sync = on_sync
        self._settings = settings or SyncSettings()
        self._shares_weights = shares_weights
        self._weights: Weights | None = None  # the newest; None while they are being published
        self._published = Notifier()

    async def pause_before_update(self) -> None:
        """Before a train step: if it changes weights under running generations, these stop first, as `on_sync` says, so that every token
        is of the version it says. They go on after `sync_weights`."""
        if self._shares_weights:
            await self._rollouter.pause_rollout("sync")

    async def sync_weights(self, version: int) -> bool:
        """Make `version` live on all engines in rotation. True when it is; raises SyncError when it cannot be."""
        if version < self.version:
            raise SyncError(
                f"weights of version {version} are older than version {self.version}, which the engines already have"
            )
        clock = asyncio.get_running_loop().time
        started = clock()
        if self._on_sync is not OnSync.SWAP:
            await self._rollouter.pause_rollout("sync")
        try:
            await self._hand_over(version)
            self._commit(version)
        finally:
            await self._rollouter.resume_rollout("sync")
        self.seconds.append(clock() - started)
        return True

    async def catch_up(self, member: Member) -> None:
        """Give the newest weights to an engine that is new or has missed a hand-over, and put it in rotation."""
        failures = 0
        while member.state in (State.STARTING, State.CATCHING_UP):
            while (weights := self._weights) is None:
                await self._published.wait()
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    await self._transport.attach(member.engine.worker)
                    await self._load(member, weights)
            except WorkerDied:
                return  # its watch sees to it
            except (PacelineError, RuntimeError, OSError) as error:
                current = (
                    weights is self._weights
                )  # else new ones were published meanwhile: no wonder
                failures += current
                why = str(error) or "no answer in time"
                log.log(
                    logging.WARNING if current else logging.INFO,
                    "worker %r could not take version %d: %s",
                    member.name,
                    weights.version,
                    why,
                )
                if failures > self._settings.retries:
                    member.engine.worker.fence(
                        WorkerDied(
                            f"worker {member.name!r} could not take new weights {failures} times: {error}"
                        )
                    )
                    return
                await asyncio.sleep(BACK_OFF_S * 2**failures)
                continue
            if weights.version >= self.version and member.state in (
                State.STARTING,
                State.CATCHING_UP,
            ):
                member.state = State.LIVE
                self._fleet.changed.notify_all()

    async def _hand_over(self, version: int) -> None:
        for attempt in range(self._settings.retries + 1):
            if attempt:
                self.retried += 1
                await asyncio.sleep(BACK_OFF_S * 2 ** (attempt - 1))
            who = "the trainer"
            try:
                self._weights = None
                async with asyncio.timeout(self._settings.timeout_s):
                    weights = await self._transport.publish(version)
                self._weights = weights
                self._published.notify_all()
                who = "any engine"
                await self._load_all(weights)
                return
            except SyncError as error:
                failure: Exception = error
            except TimeoutError:
                failure = SyncError(
                    f"no answer of {who} within sync.timeout_s = {self._settings.timeout_s:g} s"
                )
            log.warning(
                "hand-over of version %d failed (attempt %d): %s", version, attempt + 1, failure
            )
        raise SyncError(
            f"version {version} could not be handed over in {self._settings.retries + 1} attempts: {failure}"
        ) from failure

    async def _load_all(self, weights: Weights) -> None:
        """Until one engine has the weights, and a little longer for the others. If none takes them that is an error; if all have died,
        the first of those that replace them is waited for."""
        loads = [
            asyncio.ensure_future(self._load(member, weights)) for member in self._fleet.in_rotation
        ]
        try:
            failures = await self._failures(loads)
        finally:
            for load in loads:
                load.cancel()
        while not self._holders(weights.version):
            for error in failures:
                if not (isinstance(error, WorkerDied) and self._fleet.replaces_dead_engines):
                    raise error
            await self._fleet.changed.wait()

    async def _failures(self, loads: Collection["asyncio.Future[None]"]) -> list[Exception]:
        """Errors of loads. Those that are not done when this returns are late."""
        pending, finished = set(loads), set[asyncio.Future[None]]()
        while pending and all(load.exception() for load in finished):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            finished |= done
        if pending:
            finished |= (await asyncio.wait(pending, timeout=self._settings.straggler_timeout_s))[0]
        return [error for load in finished if isinstance(error := load.exception(), Exception)]

    async def _load(self, member: Member, weights: Weights) -> None:
        member.loading = True
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await member.engine.load_weights(weights)
            member.version = max(member.version, weights.version)
        finally:
            member.loading = False

    def _holders(self, version: int) -> list[Member]:
        return [member for member in self._fleet.in_rotation if member.version >= version]

    def _commit(self, version: int) -> None:
        self.version = version
        for member in self._fleet.in_rotation:
            if member.version < version:
                log.warning(
                    "worker %r missed version %d; it gets no new work until it has caught up",
                    member.name,
                    version,
                )
                self._fleet.fell_behind(member)
