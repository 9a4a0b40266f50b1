"""ParameterSynchronizer: brings new weights to the engines, retries, and counts versions.

A version counts once every engine in rotation has it. An engine that fails or is late leaves the
rotation, so that nothing waits for it: it gets no new prompts until it has caught up. Its running
generations continue, because they were admitted under an older version.

Waits for: the engines (to drain if on_sync says so, and to load). Awaited by: the loop's train
task, which returns tickets afterwards.
"""

import asyncio
import logging
from collections.abc import Collection

from paceline.errors import PacelineError, SyncError, WorkerDied
from paceline.notifier import Notifier
from paceline.rollout.fleet import Fleet
from paceline.rollout.member import Member, State
from paceline.rollout.rollouter import Rollouter
from paceline.sync.settings import SyncSettings
from paceline.sync.weights import Weights, WeightTransport
from paceline.types import OnSync

log = logging.getLogger(__name__)

BACK_OFF_S = 0.1  # before the first retry; doubles each time


class ParameterSynchronizer:
    def __init__(
        self,
        transport: WeightTransport,
        fleet: Fleet,
        rollouter: Rollouter,
        on_sync: OnSync,
        settings: SyncSettings | None = None,
        takes_turns: bool = False,
    ) -> None:
        """`takes_turns`: engines and trainer alternate, so no engine generates in a train step."""
        self.version = 0  # that every engine in rotation has
        self.retried = 0
        self.seconds: list[float] = []
        self._transport = transport
        self._fleet = fleet
        self._rollouter = rollouter
        self._on_sync = on_sync
        self._settings = settings or SyncSettings()
        self._takes_turns = takes_turns
        self._weights: Weights | None = None  # the newest; None while they are being published
        self._published = Notifier()

    async def pause_before_update(self) -> None:
        """Pause generation before a train step if engines and trainer take turns.

        An engine may read the trainer's parameters, or free its own until the next sync. So what
        on_sync says happens now, and every token has the version that it claims. Generation
        timeouts do not run meanwhile. `sync_weights` or `resume_after_update` ends the pause.
        """
        if self._takes_turns:
            await self._rollouter.pause_rollout("sync")

    async def resume_after_update(self) -> None:
        """Resume generation after a train step without a sync."""
        if self._takes_turns:
            await self._rollouter.resume_rollout("sync")

    async def sync_weights(self, version: int) -> bool:
        """Make `version` live on all engines in rotation and return True, or raise SyncError."""
        if version < self.version:
            raise SyncError(
                f"version {version} is older than version {self.version}, which the engines have"
            )
        clock = asyncio.get_running_loop().time
        started = clock()
        if self._on_sync is not OnSync.SWAP:
            await self._rollouter.pause_rollout("sync")
        try:
            await self._sync(version)
            self._commit(version)
        finally:
            await self._rollouter.resume_rollout("sync")
        self.seconds.append(clock() - started)
        return True

    async def catch_up(self, member: Member) -> None:
        """Load the newest weights into an engine that is new or late, and put it in rotation."""
        failures = 0
        while member.state in (State.STARTING, State.CATCHING_UP):
            while (weights := self._weights) is None:
                await self._published.wait()
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    await self._transport.attach(member.engine.worker)
                    await self._load(member, weights)
            except WorkerDied:
                return  # its supervisor replaces it
            except (PacelineError, RuntimeError, OSError) as error:
                # Otherwise a newer version was published and the failure is expected.
                current = weights is self._weights
                failures += current
                why = str(error) or f"no reply within {self._timeout}"
                log.log(
                    logging.WARNING if current else logging.INFO,
                    "worker %r could not load version %d: %s",
                    member.name,
                    weights.version,
                    why,
                )
                if failures > self._settings.retries:
                    died = f"worker {member.name!r} failed to load weights {failures} times: {why}"
                    member.engine.worker.fence(WorkerDied(died))
                    return
                await asyncio.sleep(BACK_OFF_S * 2**failures)
                continue
            if weights.version >= self.version and member.state in (
                State.STARTING,
                State.CATCHING_UP,
            ):
                member.state = State.LIVE
                self._fleet.members_changed()

    @property
    def _timeout(self) -> str:
        return f"sync.timeout_s = {self._settings.timeout_s:g} s"

    async def _sync(self, version: int) -> None:
        settings = self._settings
        for attempt in range(settings.retries + 1):
            if attempt:
                self.retried += 1
                await asyncio.sleep(BACK_OFF_S * 2 ** (attempt - 1))
            who = "the trainer"
            try:
                self._weights = None
                async with asyncio.timeout(settings.timeout_s):
                    weights = await self._transport.publish(version)
                self._weights = weights
                self._published.notify_all()
                who = "every engine"
                await self._load_all(weights)
                return
            except SyncError as error:
                failure: Exception = error
            except TimeoutError:
                failure = SyncError(f"{who} did not respond within {self._timeout}")
            log.warning("sync of version %d failed (attempt %d): %s", version, attempt + 1, failure)
        raise SyncError(
            f"sync of version {version} failed {settings.retries + 1} times: {failure}"
        ) from failure

    async def _load_all(self, weights: Weights) -> None:
        """Wait until one engine has loaded the weights, and a little longer for the others.

        If no engine loads them, raise. If all engines died, wait for the first replacement, or
        raise if none will come.
        """
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
            for member in self._fleet:  # those that were dead before they could load
                died = member.engine.worker.died
                if died.done() and not self._fleet.replaces_dead_engines:
                    died.result()
            await self._fleet.changed.wait()

    async def _failures(self, loads: Collection["asyncio.Future[None]"]) -> list[Exception]:
        """Return the errors of loads. Loads that are not done when this returns are late."""
        pending, finished = set(loads), set[asyncio.Future[None]]()
        while pending and all(load.exception() for load in finished):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            finished |= done
        if pending:
            timeout = self._settings.straggler_timeout_s
            finished |= (await asyncio.wait(pending, timeout=timeout))[0]
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
                    "worker %r missed version %d; it gets no new prompts until it has caught up",
                    member.name,
                    version,
                )
                self._fleet.fell_behind(member)
