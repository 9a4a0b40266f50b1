"""Router: assigns prompts to engines.

All trajectories of a prompt go to one engine, because they share its prefill. The router picks the
engine in rotation with the lowest load per slot. An engine that already has twice as many
trajectories as slots gets no new prompt: the prompt waits in the controller, where its timeout does
not run and newer weights may still arrive first.

Waits for: nothing (the rollouter waits until an engine is available). If an engine is lost, its
requests resume on another engine from the last known token. Sampling hashes the seed, so the
completion is the same.
"""

import asyncio
import math
from collections.abc import Iterable
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
        engine. `max_load`: number of trajectories at which an engine gets no new prompt; None: no
        limit.
        """
        self.hedge_after_s = hedge_after_s
        self.quarantine = quarantine or Quarantine()
        self._members = members
        self._max_load = max_load
        self._prompt_waits = False  # a prompt found no engine with room

    def choose(self, avoid: Member | None = None) -> Member | None:
        """Return the engine in rotation with the lowest load per slot, or None if all are full.

        Ties go to the first engine, so that a wave of prompts is always distributed the same way.
        """
        best, least = None, math.inf
        for member in self._members:
            # In a fleet of hundreds this takes the most time, so the cheapest tests come first.
            stats, load = member.stats, member.load
            pressure = load / stats.slots if stats else float(load)
            if pressure >= least:
                continue
            if load and stats and stats.kv_used > KV_FULL:
                pressure += PREEMPTS
            if pressure >= least or not self._has_room(member):
                continue
            if member.in_rotation and member is not avoid:
                best, least = member, pressure
                if load == 0:
                    break
        self._prompt_waits |= best is None
        return best

    def made_room(self, member: Member) -> bool:
        """Return whether a waiting prompt may fit, now that a trajectory on `member` has ended."""
        if not self._prompt_waits or not self._has_room(member):
            return False
        self._prompt_waits = False
        return True

    def _has_room(self, member: Member) -> bool:
        return self._max_load is None or member.load < self._max_load


class EngineAssignment:
    """Assignment of one prompt's trajectories to an engine.

    Call `assign` before every `generate`, `release` after each trajectory, and `close` at the end.
    """

    def __init__(self, router: Router, trajectories: int, uid: str) -> None:
        router.quarantine.check(uid)
        self._router, self._uid = router, uid
        self._in_flight = trajectories
        self._member: Member | None = None
        self._lost_to: set[int] = set()  # incarnations that were dead or died while assigned
        self._suspected: set[int] = set()  # those of them that had the prompt when they died

    @property
    def losses(self) -> int:
        return len(self._lost_to)

    def assign(self) -> bool:
        """Assign to an engine in rotation, preferably the current one; return whether it worked."""
        if self._member is None or not self._member.in_rotation:
            free = self._router.quarantine.may_start(self._uid, self)
            self._move(self._router.choose() if free else None)
        return self._member is not None

    def release(self) -> bool:
        """Record that one trajectory has ended; return whether a waiting prompt may fit now."""
        self._in_flight -= 1
        if self._member is None:
            return False
        self._member.load -= 1
        return self._router.made_room(self._member)

    def close(self) -> bool:
        """Give up the engine; return whether a suspected prompt may start now."""
        self._move(None)
        return self._router.quarantine.end_turn(self)

    def succeeded(self) -> None:
        """Record that an engine completed the prompt."""
        self._router.quarantine.clear(self._uid)

    async def generate(self, request: Request) -> Completion:
        assert self._member, "assign() was not called"
        if self._router.hedge_after_s is None:
            return await self._on(self._member, request)
        return await self._hedged(self._member, request, self._router.hedge_after_s)

    def _move(self, target: Member | None) -> None:
        if self._member:
            self._member.load -= self._in_flight
        if target:
            target.load += self._in_flight
        self._member = target

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
