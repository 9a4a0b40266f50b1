"""Router: assigns prompts to engines.

All trajectories of a prompt go to one engine, because they share its prefill. The router picks the
engine in rotation with the lowest load per slot. An engine that already generates twice as many
trajectories as it has slots gets no more: prompts and further turns wait in the controller, where
their timeout does not run and newer weights may still arrive first. A trajectory that waits for its
environment has no place at an engine.

Waits for: an engine with room. Waiters try in their order, and only until one finds no room, so
thousands of them cost nothing. If an engine is lost, its requests resume on another engine from the
last known token. Sampling hashes the seed, so the completion is the same.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from paceline.errors import WorkerDied
from paceline.rollout.member import Member
from paceline.rollout.quarantine import Quarantine
from paceline.types import Completion, Finish, Request, empty_completion

KV_FULL = 0.95  # KV cache use above which an engine preempts sequences or lets them wait
PREEMPTS = 1e9  # load per slot that such an engine counts as having in addition


class Router:
    def __init__(
        self,
        members: Iterable[Member],
        hedge_after_s: float | None = None,
        max_load: int | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        """Create a router over the current members of the fleet.

        `hedge_after_s`: seconds after which an unfinished completion is also started on a second
        engine. `max_load`: number of trajectories at which an engine gets no more; None: no limit.
        """
        self.hedge_after_s = hedge_after_s
        self.quarantine = quarantine or Quarantine()
        self._members = members
        self._max_load = max_load
        self._full = False  # the last waiter that tried found no engine with room
        # Futures of the waiters, with what takes their places: by the engine of their prompt, and
        # under None those that any engine can take.
        self._lines: dict[Member | None, dict[asyncio.Future[None], Callable[[], bool]]] = {}

    def choose(self, avoid: Member | None = None) -> Member | None:
        """Return the engine in rotation with the lowest load per slot, or None if all are full.

        Ties go to the first engine, so that a wave of prompts is always distributed the same way.
        """
        best, least = None, math.inf
        for member in self._members:
            # In a fleet of hundreds this takes the most time, so the cheapest tests come first.
            load, stats = member.load, member.stats
            pressure = load / stats.slots if stats else float(load)
            if pressure >= least:
                continue
            if load and stats and stats.kv_used > KV_FULL:
                pressure += PREEMPTS
            if pressure >= least or not self.has_room(member):
                continue
            if member.in_rotation and member is not avoid:
                best, least = member, pressure
                if load == 0:
                    break
        self._full |= best is None
        return best

    async def wait(self, member: Member | None, take: Callable[[], bool]) -> None:
        """Wait until `take` returns true. It takes a place, at `member` if that is given."""
        if take():
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(member, {})[waiter] = take
        try:
            await waiter
        finally:
            for key in (member, None):  # the engine may have been lost meanwhile
                self._lines.get(key, {}).pop(waiter, None)

    def recheck(self, member: Member | None = None) -> None:
        """Let waiters try again: a place at `member` is free, or the members have changed."""
        if member is None:
            for lost in [key for key in self._lines if key and not key.in_rotation]:
                self._lines.setdefault(None, {}).update(self._lines.pop(lost))
            for key in list(self._lines):
                self._admit(key)
        elif self._lines and self.has_room(member):
            self._admit(member)  # further turns first: their groups are older
            self._admit(None)

    def _admit(self, key: Member | None) -> None:
        line, done = self._lines.get(key, {}), []
        for waiter, take in line.items():
            self._full = False
            if waiter.done() or take():
                done.append(waiter)
            elif self._full:
                break  # else this one waits for something else
        for waiter in done:
            del line[waiter]
            if not waiter.done():
                waiter.set_result(None)
        if not line:
            self._lines.pop(key, None)

    def has_room(self, member: Member) -> bool:
        room = self._max_load is None or member.load < self._max_load
        self._full |= not room
        return room


class EngineAssignment:
    """Assignment of one prompt's trajectories to an engine.

    A trajectory has a place at the engine while it generates. The first is reserved for each when
    the prompt is assigned. Call `close` at the end.
    """

    def __init__(self, router: Router, trajectories: Collection[int], uid: str) -> None:
        router.quarantine.check(uid)
        self._router, self._uid = router, uid
        self._reserved = set(trajectories)
        self._places = len(trajectories)
        self.member: Member | None = None
        self._lost_to: set[int] = set()  # incarnations that were dead or died while assigned
        self._suspected: set[int] = set()  # those of them that had the prompt when they died

    @property
    def losses(self) -> int:
        return len(self._lost_to)

    def assign(self) -> bool:
        """Assign to an engine in rotation, preferably the current one; return whether it worked."""
        if self.member is None or not self.member.in_rotation:
            free = self._router.quarantine.may_start(self._uid, self)
            self._move(self._router.choose() if free else None)
        return self.member is not None

    def use_reserved(self, trajectory: int) -> bool:
        """Return whether a trajectory has a reserved place, which it has no longer after this."""
        if trajectory not in self._reserved:
            return False
        self._reserved.remove(trajectory)
        return True

    def take_place(self) -> bool:
        """Take a place for a further turn; return whether there was one."""
        if not self.assign() or not self.member or not self._router.has_room(self.member):
            return False
        self._places += 1
        self.member.load += 1
        return True

    def give_up_place(self) -> Member | None:
        """Give up a place; return the engine that has room for another trajectory now."""
        self._places -= 1
        if self.member:
            self.member.load -= 1
        return self.member

    def close(self) -> bool:
        """Give up the engine; return whether a suspected prompt may start now."""
        self._move(None)
        return self._router.quarantine.end_turn(self)

    def succeeded(self) -> None:
        """Record that an engine completed the prompt."""
        self._router.quarantine.clear(self._uid)

    async def generate(self, request: Request) -> Completion:
        assert self.member, "assign() was not called"
        if self._router.hedge_after_s is None:
            return await self._on(self.member, request)
        return await self._hedged(self.member, request, self._router.hedge_after_s)

    def _move(self, target: Member | None) -> None:
        if self.member:
            self.member.load -= self._places
        if target:
            target.load += self._places
        self.member = target

    async def _on(self, member: Member, request: Request) -> Completion:
        alive = False
        try:
            if self._lost_to:
                # Probe first: a prompt that kills an engine before it is accepted must count, but
                # an engine that was already dead must not count against this prompt.
                await member.engine.stats()
                alive = True
            completion = await member.engine.generate(request)
        except WorkerDied:
            if alive or member.engine.accepted(request.id):
                self._suspect(member)
            if not member.elastic:
                raise
            self._lost_to.add(member.incarnation)
            self._router.quarantine.check(self._uid)
            return _last_known(request)
        member.completions += completion.finish is not Finish.INTERRUPT
        return completion

    def _suspect(self, member: Member) -> None:
        """Record the death of an engine, once for all trajectories of the prompt."""
        if member.incarnation not in self._suspected:
            self._suspected.add(member.incarnation)
            self._router.quarantine.suspect(self._uid, member.name)

    async def _hedged(self, member: Member, request: Request, after_s: float) -> Completion:
        """Return the first of two completions; the second starts after `after_s` on another engine.

        If both are interrupted, return the longer one.
        """
        tasks = [asyncio.ensure_future(self._on(member, request))]
        try:
            done, _ = await asyncio.wait(tasks, timeout=after_s)
            if not done and (other := self._router.choose(avoid=member)):
                tasks.append(
                    asyncio.ensure_future(self._on(other, replace(request, id=f"{request.id}+")))
                )
            longest: Completion | None = None
            for task in asyncio.as_completed(tasks):
                completion = await task
                if completion.finish is not Finish.INTERRUPT:
                    return completion
                if longest is None or len(completion) > len(longest):
                    longest = completion
            assert longest
            return longest
        finally:
            for task in tasks:
                task.cancel()  # the engine client aborts a cancelled request


def _last_known(request: Request) -> Completion:
    """Return the tokens a request already had when it was sent to the lost engine."""
    if request.partial:
        return replace(request.partial, finish=Finish.INTERRUPT)
    return empty_completion()
