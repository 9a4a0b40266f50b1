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
        # The waiters of each prompt, with what takes their places.
        self._waiters: dict[EngineAssignment, dict[asyncio.Future[None], Callable[[], bool]]] = {}
        # Prompts with waiters, by their engine; those that any engine can take are under None.
        self._lines: dict[Member | None, dict[EngineAssignment, None]] = {}

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

    async def wait(self, assignment: "EngineAssignment", take: Callable[[], bool]) -> None:
        """Wait until `take` returns true: it takes a place for a trajectory of this prompt."""
        if take():
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(assignment, {})[waiter] = take
        self._lines.setdefault(assignment.member, {})[assignment] = None
        try:
            await waiter
        finally:
            self._forget(assignment, waiter)

    def recheck(self, member: Member | None = None) -> None:
        """Let waiters try again: a place at `member` is free, or the members have changed."""
        if member is None:
            # All of them: after an interruption, those that have places wait only for the resume.
            for assignment in list(self._waiters):
                for waiter in list(self._waiters.get(assignment, {})):
                    self._takes(assignment, waiter)
        elif self._lines:
            self._admit(member)  # further turns first: their groups are older
            if self.has_room(member):
                self._admit(None)

    def moved(self, assignment: "EngineAssignment", target: Member | None) -> None:
        """Let the waiters of a prompt wait for the engine that it is about to have."""
        if assignment in self._waiters:
            self._leave_line(assignment)
            self._lines.setdefault(target, {})[assignment] = None

    def _admit(self, key: Member | None) -> None:
        """Give places to the waiters of a line, in their order, until one finds no room."""
        while line := self._lines.get(key):
            left = self._let_try(next(iter(line)), key)
            if left is None:
                break
            if not left:
                return
        for assignment in list(self._lines.get(key, {})):  # the first waits for something else
            if self._let_try(assignment, key) is False:
                return

    def _let_try(self, assignment: "EngineAssignment", key: Member | None) -> bool | None:
        """Let the waiters of a prompt try to take places.

        Returns whether the prompt has left this line, or None if it waits for more than room.
        """
        for waiter in list(self._waiters.get(assignment, {})):
            if not self._takes(assignment, waiter) and self._full:
                break
        if assignment not in self._lines.get(key, {}):
            return True
        return False if self._full else None

    def _takes(self, assignment: "EngineAssignment", waiter: "asyncio.Future[None]") -> bool:
        """Let a waiter try to take a place; return whether it waits no longer."""
        self._full = False
        if not (waiter.done() or self._waiters[assignment][waiter]()):
            return False
        self._forget(assignment, waiter)
        if not waiter.done():
            waiter.set_result(None)
        return True

    def _forget(self, assignment: "EngineAssignment", waiter: "asyncio.Future[None]") -> None:
        waiters = self._waiters.get(assignment, {})
        if waiters.pop(waiter, None) and not waiters:
            self._leave_line(assignment)
            del self._waiters[assignment]

    def _leave_line(self, assignment: "EngineAssignment") -> None:
        line = self._lines[assignment.member]
        del line[assignment]
        if not line:
            del self._lines[assignment.member]

    def has_room(self, member: Member, further: bool = False) -> bool:
        """Return whether an engine takes another trajectory, or another turn with `further`.

        A turn does not wait for places of trajectories that have not begun: these may wait for what
        the turn's episode holds.
        """
        load = member.load - member.reserved if further else member.load
        room = self._max_load is None or load < self._max_load
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
        if self.member:
            self.member.reserved -= 1
        return True

    def take_place(self) -> bool:
        """Take a place for a further turn; return whether there was one."""
        if not self.assign() or not self.member:
            return False
        if not self._router.has_room(self.member, further=True):
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
        if target is self.member:
            return
        self._router.moved(self, target)
        if self.member:
            self.member.load -= self._places
            self.member.reserved -= len(self._reserved)
        if target:
            target.load += self._places
            target.reserved += len(self._reserved)
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
