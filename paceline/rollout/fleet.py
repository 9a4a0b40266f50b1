"""The engines of a running job. They may join and leave, and one that dies or falls silent is replaced; training goes on meanwhile.

Waits for: heartbeats (a stopped process is reported by nobody, so silence has a deadline of its own), the deaths of workers, new
workers to start and to fetch the current weights. Only workers that do nothing but rollout come and go; the death of one that
plays another role too ends the run.
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
from paceline.types import OnSync

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
BACK_OFF_S = 0.5  # before a worker is started for the second time; doubles from there

CatchUp = Callable[[Member], Coroutine[Any, Any, None]]
Launch = Callable[[str], Awaitable[EngineClient]]


class FleetSettings(Settings):
    heartbeat_timeout_s: float | None = Field(None, gt=0)
    """Seconds a rollout worker may be silent before it counts as dead. Unset: half of rollout.generation_timeout, from 5 to 30."""
    max_restarts: int = Field(3, ge=0)
    """How often a rollout worker is replaced that dies again and again without finishing an answer; then the run ends."""
    hedge_after_s: float | None = Field(None, gt=0)
    """Start an answer that takes longer than this on a second engine too; the first to finish counts. Unset: never."""


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
    ) -> None:
        """`shared`: names of workers that play other roles too. `launch(name)` starts one more rollout worker; without it
        the fleet stays as it is. `loading_timeout_s`: how long a worker may be silent that is loading new weights."""
        self.replaced = 0
        self.changed = changed or Notifier()
        self._pool = pool  # names of new workers begin with it
        self._launch = launch
        self._silence_s, self._loading_s = (
            heartbeat_timeout_s,
            max(heartbeat_timeout_s, loading_timeout_s),
        )
        self._max_restarts = max_restarts
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
        self._names = {
            member.name for member in self._members
        }  # in use, also by those that are being started
        self._lost: list[EngineClient] = []  # incarnations that were declared dead
        self._closing: set[asyncio.Task[None]] = set()
        self._pending_calls: set[asyncio.Future[None]] = set()  # to pause or to go on
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
        """The workers that are looked after here; the death of any other ends the run."""
        return {member.engine.worker for member in self._members if member.elastic}

    @property
    def fenced_messages(self) -> int:
        """Messages of workers that had been declared dead."""
        return sum(engine.worker.fenced for engine in self._lost)

    def stats(self) -> list[EngineStats]:
        """What each engine said last."""
        return [member.stats for member in self._members if member.stats]

    def unavailable_engines(self) -> list[str]:
        """What keeps engines from taking work, in words."""
        starting = self._names - {member.name for member in self._members}
        unavailable_engines = [
            f"worker {member.name!r} is {member.state}"
            for member in self._members
            if not member.in_rotation
        ]
        return unavailable_engines + [
            f"worker {name!r} is being started" for name in sorted(starting)
        ]

    @property
    def replaces_dead_engines(self) -> bool:
        """Whether engines that die are being replaced."""
        return self._tasks is not None

    # --- supervision ---

    async def run(self, catch_up: CatchUp) -> None:
        """Look after all engines until cancelled. `catch_up` gives an engine the current weights and puts it in rotation."""
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
        """It has missed a hand-over: no new work until it has caught up."""
        if member.state is State.LIVE:
            member.state = State.CATCHING_UP
            if self._tasks and self._catch_up:
                self._tasks.create_task(self._catch_up(member))

    def _watch(self, member: Member) -> None:
        assert self._tasks
        self._watches[member.incarnation] = self._tasks.create_task(self._supervise(member))

    async def _supervise(self, member: Member) -> None:
        """Listen for its heartbeat until it is lost; then see to its replacement."""
        worker = member.engine.worker
        try:
            while True:
                await self._heartbeat(member)
                await asyncio.wait({worker.died}, timeout=HEARTBEAT_S)
        except WorkerDied as error:
            if not member.elastic:
                raise
            self._remove(member, error)
            self._lost.append(member.engine)
            failures = 1 if member.answers else member.failures + 1
            log.warning(
                "%s; its unfinished groups go to other engines, and it is replaced",
                str(error).partition("; last lines")[0],
            )
            await self._start(member.name, failures, error)
            self.replaced += 1

    async def _heartbeat(self, member: Member) -> None:
        clock = asyncio.get_running_loop().time
        asked, before, heard = clock(), member.stats, member.heard_s
        beat = asyncio.ensure_future(member.engine.stats())
        try:
            while not beat.done():
                silent_s, may_be_s = (
                    clock() - asked,
                    self._loading_s if member.loading else self._silence_s,
                )
                if member.elastic and silent_s >= may_be_s:
                    raise WorkerDied(
                        f"worker {member.name!r} has been silent for {silent_s:.0f} s (fleet.heartbeat_timeout_s)"
                    )
                await asyncio.wait(
                    {beat}, timeout=max(0.01, may_be_s - silent_s) if member.elastic else None
                )
        finally:
            beat.cancel()
        member.stats, member.heard_s = beat.result(), clock()
        if before and member.heard_s > heard:
            member.tokens_per_s = (member.stats.tokens - before.tokens) / (member.heard_s - heard)

    async def _start(
        self, name: str, failures: int = 0, cause: PacelineError | None = None
    ) -> Member:
        """Start a worker under this name, again and again until it stands or the budget is used up."""
        assert self._launch and self._tasks and self._catch_up
        while failures <= self._max_restarts:
            await asyncio.sleep(BACK_OFF_S * 2 ** (failures - 2) if failures > 1 else 0)
            try:
                engine = await self._launch(name)
            except PacelineError as error:
                log.warning("worker %r could not be started: %s", name, error)
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
            f"rollout worker {name!r} failed {failures} times in a row without finishing an answer; fleet.max_restarts = "
            f"{self._max_restarts} are made good. The last time: {cause}"
        ) from cause

    def _remove(self, member: Member, error: WorkerDied) -> None:
        """Nothing it says counts from here on; what it was doing is handed back; its process ends."""
        member.state = State.DEAD
        member.engine.worker.fence(error)
        self._members.remove(member)
        self.changed.notify_all()
        task = asyncio.ensure_future(member.engine.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # --- what people ask for ---

    async def add(self, count: int = 1) -> list[str]:
        """Start more engines; once they have fetched the current weights they take work."""
        if self._launch is None or self._tasks is None:
            raise ConfigError(
                "workers cannot be added: the engine shares its worker with the trainer; give rollout a pool of its own"
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
        for name, outcome in zip(names, started, strict=True):
            if isinstance(outcome, BaseException):
                self._names.discard(name)
                raise outcome
        return names

    async def remove(self, name: str) -> None:
        """Let an engine go; its unfinished answers go on elsewhere from where they are."""
        member = next(
            (
                member
                for member in self._members
                if member.name == name and member.state is not State.REMOVING
            ),
            None,
        )
        if member is None:
            raise ConfigError(
                f"there is no rollout worker {name!r}; there are {', '.join(m.name for m in self._members)}"
            )
        if not member.elastic:
            raise ConfigError(f"worker {name!r} cannot be removed: it plays other roles too")
        if self.in_rotation in ([], [member]):
            raise ConfigError(
                f"worker {name!r} cannot be removed: no other is in rotation; add one first"
            )
        member.state = State.REMOVING
        self._watches.pop(member.incarnation).cancel()
        try:
            async with asyncio.timeout(self._silence_s):
                await member.engine.pause(OnSync.INTERRUPT)
        except (TimeoutError, WorkerDied) as failed:
            log.warning(
                "worker %r did not hand back its answers (%s); they start over elsewhere",
                name,
                failed,
            )
        self._remove(member, WorkerDied(f"worker {name!r} was removed"))
        self._names.discard(name)

    async def describe(self) -> list[dict[str, Any]]:
        """A row for each engine, as `paceline workers list` prints them."""
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

    async def pause(self, mode: OnSync) -> None:
        await self._each(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        await self._each(lambda engine: engine.resume())

    async def _each(self, act: Callable[[EngineClient], Awaitable[Any]]) -> None:
        """Do this with all engines. One that is out of rotation is told and not waited for: it may be loading, deaf to everybody. One that
        dies meanwhile is seen to by its watch."""

        async def guarded(member: Member) -> None:
            try:
                await act(member.engine)
            except WorkerDied:
                if not member.elastic:
                    raise

        told = [
            (member, asyncio.ensure_future(guarded(member)))
            for member in self
            if member.state is not State.REMOVING
        ]
        self._pending_calls = {task for task in self._pending_calls if not task.done()} | {
            task for _, task in told
        }
        await asyncio.gather(*(task for member, task in told if member.in_rotation))

    async def close(self) -> None:
        for task in self._pending_calls:
            task.cancel()
        await asyncio.gather(*(member.engine.close() for member in self._members), *self._closing)
