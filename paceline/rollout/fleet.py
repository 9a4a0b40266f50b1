"""Fleet of rollout engines: replaces dead or unresponsive engines, adds and removes engines.

Waits for: heartbeats (a suspended process reports no death, so a missing heartbeat has a deadline),
deaths of workers, and new workers to start and fetch the current weights. Training continues
meanwhile. Only workers without another role are replaced; the death of any other ends the run.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from typing import Any

from pydantic import Field

from paceline.errors import ConfigError, PacelineError, WorkerDied
from paceline.notifier import Notifier
from paceline.remote.worker import Worker
from paceline.rollout.client import EngineClient
from paceline.rollout.engine import EngineStats
from paceline.rollout.member import Member, State
from paceline.settings import Settings
from paceline.types import Completion, OnSync

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
PARTIALS_TIMEOUT_S = 10.0  # for the unfinished completions of an engine
BACK_OFF_S = 0.5  # delay before the second start of a worker; doubles with every further start

CatchUp = Callable[[Member], Coroutine[Any, Any, None]]
Launch = Callable[[str], Awaitable[EngineClient]]


class FleetSettings(Settings):
    heartbeat_timeout_s: float | None = Field(None, gt=0)
    """Seconds without a heartbeat after which a rollout worker counts as dead. Default: half of
    rollout.generation_timeout, at least 5 and at most 30."""
    max_restarts: int = Field(3, ge=0)
    """Maximum consecutive restarts of a rollout worker that finishes no completion in between. The
    next failure ends the run."""
    hedge_after_s: float | None = Field(None, gt=0)
    """Seconds after which an unfinished completion is also started on a second engine; the first to
    finish counts. Default: never."""


class Fleet:
    def __init__(
        self,
        engines: Sequence[EngineClient],
        *,
        pool: str = "rollout",
        shared: Collection[str] = (),
        launch: Launch | None = None,
        heartbeat_timeout_s: float = 30.0,
        loading_timeout_s: float = 60.0,
        max_restarts: int = 3,
        changed: Notifier | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """Create a fleet of running engines.

        `shared`: names of workers that also have other roles. `launch(name)` starts a rollout
        worker; without it, engines cannot be added or replaced. `loading_timeout_s`: heartbeat
        timeout of a worker that is loading new weights. `heartbeat_s`: seconds between heartbeats.
        """
        self.replaced = 0
        self.changed = changed or Notifier()
        self.on_change: Callable[[], None] = lambda: None  # called when members come or go
        self._pool = pool  # prefix of the names of new workers
        self._launch = launch
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._loading_timeout_s = max(heartbeat_timeout_s, loading_timeout_s)
        self._max_restarts, self._heartbeat_s = max_restarts, heartbeat_s
        self._incarnations = itertools.count()
        self._members = [
            Member(
                engine.worker.name,
                next(self._incarnations),
                engine,
                elastic=launch is not None and engine.worker.name not in shared,
            )
            for engine in engines
        ]
        # Names in use, including those of workers that are starting.
        self._names = {member.name for member in self._members}
        # Completions by incarnation, when they were last taken.
        self._counted: dict[int, int] = {}
        self._lost: list[EngineClient] = []  # incarnations that were declared dead
        self._closing: set[asyncio.Task[None]] = set()
        self._pending_calls: set[asyncio.Future[None]] = set()  # of pause() and resume()
        self._watches: dict[int, asyncio.Task[None]] = {}  # by incarnation
        self._catch_up: CatchUp | None = None
        self._tasks: asyncio.TaskGroup | None = None

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members))

    @property
    def in_rotation(self) -> list[Member]:
        return [member for member in self._members if member.in_rotation]

    @property
    def elastic(self) -> set[Worker]:
        """Workers that the fleet replaces; the death of any other worker ends the run."""
        return {member.engine.worker for member in self._members if member.elastic}

    @property
    def fenced_messages(self) -> int:
        """Number of discarded messages from workers that had been declared dead."""
        return sum(engine.worker.fenced for engine in self._lost)

    def stats(self) -> list[EngineStats]:
        return [member.stats for member in self._members if member.stats]

    def take_completions(self) -> list[int]:
        """Return the completions that each engine in rotation finished since the last call."""
        counts = {member.incarnation: member.completions for member in self.in_rotation}
        before, self._counted = self._counted, counts
        return [count - before.get(incarnation, 0) for incarnation, count in counts.items()]

    def metrics(self) -> dict[str, float]:
        return {
            "fleet/engines": float(len(self.in_rotation)),
            "fleet/completions_min": float(min(self.take_completions(), default=0)),
            "fleet/replaced": float(self.replaced),
            "fleet/fenced_messages": float(self.fenced_messages),
            "fleet/tokens_prefilled": float(sum(each.tokens_prefilled for each in self.stats())),
            "fleet/tokens_reused": float(sum(each.tokens_reused for each in self.stats())),
        }

    def unavailable_engines(self) -> list[str]:
        """Describe each engine that takes no new prompts."""
        starting = self._names - {member.name for member in self._members}
        return [
            f"worker {member.name!r} is {member.state}"
            for member in self._members
            if not member.in_rotation
        ] + [f"worker {name!r} is being started" for name in sorted(starting)]

    @property
    def replaces_dead_engines(self) -> bool:
        """Whether the supervision runs, which replaces dead engines."""
        return self._tasks is not None

    # --- supervision ---

    async def run(self, catch_up: CatchUp) -> None:
        """Supervise all engines until cancelled.

        `catch_up` gives an engine the current weights and puts it in rotation.
        """
        self._catch_up = catch_up
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for member in self:
                    self._watch(member)
                    if member.state is State.CATCHING_UP:
                        self._tasks.create_task(catch_up(member))
                await asyncio.get_running_loop().create_future()
        finally:
            self._tasks = None

    def fell_behind(self, member: Member) -> None:
        """Take an engine that missed a weight sync out of rotation until it has caught up."""
        if member.state is State.LIVE:
            member.state = State.CATCHING_UP
            if self._tasks and self._catch_up:
                self._tasks.create_task(self._catch_up(member))
            self.members_changed()  # turns that wait for it may go elsewhere

    def members_changed(self) -> None:
        """Report that an engine has entered or left the rotation."""
        self.changed.notify_all()
        self.on_change()

    def _watch(self, member: Member) -> None:
        assert self._tasks
        self._watches[member.incarnation] = self._tasks.create_task(self._supervise(member))

    async def _supervise(self, member: Member) -> None:
        """Poll the heartbeat of an engine until it is lost, then start a replacement."""
        worker = member.engine.worker
        try:
            while True:
                await self._heartbeat(member)
                await asyncio.wait({worker.died}, timeout=self._heartbeat_s)
        except WorkerDied as error:
            if not member.elastic:
                raise
            self._remove(member, error)
            self._lost.append(member.engine)
            failures = 1 if member.completions else member.failures + 1
            log.warning(
                "%s; reassigning its unfinished groups and starting a replacement",
                str(error).partition("; last lines")[0],
            )
            await self._start(member.name, failures, error)
            self.replaced += 1

    async def _heartbeat(self, member: Member) -> None:
        clock = asyncio.get_running_loop().time
        sent_s, previous, previous_s = clock(), member.stats, member.stats_s
        reply = asyncio.ensure_future(member.engine.stats())
        try:
            while not reply.done():
                waited_s = clock() - sent_s
                timeout_s = self._loading_timeout_s if member.loading else self._heartbeat_timeout_s
                if member.elastic and waited_s >= timeout_s:
                    raise WorkerDied(
                        f"worker {member.name!r} has been unresponsive for {waited_s:.0f} s "
                        "(fleet.heartbeat_timeout_s)"
                    )
                await asyncio.wait(
                    {reply}, timeout=max(0.01, timeout_s - waited_s) if member.elastic else None
                )
        finally:
            reply.cancel()
        member.stats, member.stats_s = reply.result(), clock()
        if previous and member.stats_s > previous_s:
            tokens = member.stats.tokens - previous.tokens
            member.tokens_per_s = tokens / (member.stats_s - previous_s)

    async def _start(
        self, name: str, failures: int = 0, cause: PacelineError | None = None
    ) -> Member:
        """Start a worker with this name; retry up to fleet.max_restarts times."""
        assert self._launch and self._tasks and self._catch_up
        while failures <= self._max_restarts:
            await asyncio.sleep(BACK_OFF_S * 2 ** (failures - 2) if failures > 1 else 0)
            try:
                engine = await self._launch(name)
            except PacelineError as error:
                log.warning("could not start worker %r: %s", name, error)
                failures, cause = failures + 1, error
                continue
            member = Member(
                name,
                next(self._incarnations),
                engine,
                state=State.STARTING,
                version=-1,
                failures=failures,
            )
            self._members.append(member)
            self._watch(member)
            self._tasks.create_task(self._catch_up(member))
            return member
        raise WorkerDied(
            f"rollout worker {name!r} failed {failures} times in a row "
            "without finishing a completion "
            f"(fleet.max_restarts = {self._max_restarts}). Last error: {cause}"
        ) from cause

    def _remove(self, member: Member, error: WorkerDied) -> None:
        """Fence the engine, return its unfinished requests and close its process."""
        member.state = State.DEAD
        member.engine.worker.fence(error)
        self._members.remove(member)
        self.members_changed()
        task = asyncio.ensure_future(member.engine.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # --- commands ---

    async def add(self, count: int = 1) -> list[str]:
        """Start more engines and return their names; they join once they have the weights."""
        if self._launch is None or self._tasks is None:
            raise ConfigError(
                "workers cannot be added: the engine shares its worker with the trainer; "
                "give rollout a separate pool"
            )
        free = (
            name
            for number in itertools.count(1)
            if (name := f"{self._pool}-{number}") not in self._names
        )
        names = list(itertools.islice(free, count))
        self._names.update(names)
        started = await asyncio.gather(
            *(self._start(name) for name in names), return_exceptions=True
        )
        failed = {
            name: outcome
            for name, outcome in zip(names, started, strict=True)
            if isinstance(outcome, BaseException)
        }
        self._names -= failed.keys()
        for error in failed.values():
            raise error
        return names

    async def remove(self, name: str) -> None:
        """Remove an engine; other engines resume its unfinished completions."""
        present = [member for member in self._members if member.state is not State.REMOVING]
        member = next((member for member in present if member.name == name), None)
        if member is None:
            raise ConfigError(
                f"there is no rollout worker {name!r}; "
                f"expected one of {', '.join(member.name for member in present)}"
            )
        if not member.elastic:
            raise ConfigError(f"worker {name!r} cannot be removed: it has other roles too")
        if self.in_rotation in ([], [member]):
            raise ConfigError(
                f"worker {name!r} cannot be removed: no other worker is in rotation; add one first"
            )
        member.state = State.REMOVING
        self._watches.pop(member.incarnation).cancel()
        try:
            async with asyncio.timeout(self._heartbeat_timeout_s):
                await member.engine.pause(OnSync.INTERRUPT)
        except (TimeoutError, WorkerDied) as failed:
            log.warning(
                "worker %r did not return its unfinished completions (%s); "
                "they start over on other engines",
                name,
                str(failed) or f"no reply within {self._heartbeat_timeout_s:g} s",
            )
        self._remove(member, WorkerDied(f"worker {name!r} was removed"))
        self._names.discard(name)

    async def describe(self) -> list[dict[str, Any]]:
        """Return a row per engine for `paceline workers list`."""
        return [
            {
                "name": member.name,
                "node": member.engine.worker.node,
                "incarnation": member.incarnation,
                "state": member.state.value,
                "version": member.version,
                "load": member.load,
                "tokens_per_s": round(member.tokens_per_s, 1),
            }
            for member in self._members
        ]

    async def partials(self) -> dict[str, Completion]:
        """Return the tokens so far of the requests in all engines that reply in time."""
        calls = [asyncio.ensure_future(member.engine.partials()) for member in self]
        found: dict[str, Completion] = {}
        try:
            if calls:
                await asyncio.wait(calls, timeout=PARTIALS_TIMEOUT_S)
            for call in calls:
                if call.done() and not call.cancelled() and call.exception() is None:
                    found.update(call.result())
        finally:
            for call in calls:
                call.cancel()
        return found

    async def pause(self, mode: OnSync) -> None:
        await self._each(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        await self._each(lambda engine: engine.resume())

    async def _each(self, act: Callable[[EngineClient], Awaitable[Any]]) -> None:
        """Call all engines and wait for those in rotation.

        An engine out of rotation may be loading weights and unresponsive, so its reply is not
        awaited. If an engine dies meanwhile, its supervision handles it.
        """

        async def guarded(member: Member) -> None:
            try:
                await act(member.engine)
            except WorkerDied:
                if not member.elastic:
                    raise

        calls = [
            (member, asyncio.ensure_future(guarded(member)))
            for member in self
            if member.state is not State.REMOVING
        ]
        self._pending_calls = {call for call in self._pending_calls if not call.done()}
        self._pending_calls.update(call for _, call in calls)
        await asyncio.gather(*(call for member, call in calls if member.in_rotation))

    async def close(self) -> None:
        for call in self._pending_calls:
            call.cancel()
        await asyncio.gather(*(member.engine.close() for member in self._members), *self._closing)
