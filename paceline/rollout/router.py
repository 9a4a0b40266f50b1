"""Which engine a prompt goes to. All attempts at one prompt stay together, since they share its prefill; a prompt goes to the engine
with the most room; an engine that is behind, leaving or dead gets none. One that has twice as many
attempts as slots gets none either: what is left waits here, where no time of an answer passes and newer weights may still come first.

Waits for: nothing (the rollouter waits until an engine is in rotation). An engine that is lost hands back what it was given: the
answer goes on elsewhere from where it last stood, and random numbers hashed from its seed make it the same answer.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from paceline.errors import RolloutError, WorkerDied
from paceline.rollout.member import Member
from paceline.types import Completion, Finish, Request, empty_completion

KV_FULL = 0.95  # an engine this full makes sequences wait or starts them over, however few they are
MAX_LOSSES = 3  # engines that may die under a prompt before the prompt is suspected of killing them


class Router:
    def __init__(
        self, members: Iterable[Member], hedge_after_s: float | None = None, most: int | None = None
    ) -> None:
        """`members`: the live view of who is there. `hedge_after_s`: start a late answer on a second engine too. `most`: an engine that
        has so many attempts gets no more; None: whatever comes."""
        self.hedge_after_s = hedge_after_s
        self._members = members
        self._most = most
        self._waited_for = False  # room

    def choose(self, avoid: Member | None = None) -> Member | None:
        """The engine in rotation with the most room; the first of equals, so that a wave of prompts is always dealt out alike."""
        candidates = [
            member for member in self._members if member.in_rotation and member is not avoid
        ]
        free = [member for member in candidates if self._has_room(member)]
        self._waited_for |= not free
        return min(free, key=_pressure, default=None)

    def made_room(self, member: Member) -> bool:
        """One attempt on it is over; whether that is what somebody waits for."""
        if not self._waited_for or not self._has_room(member):
            return False
        self._waited_for = False
        return True

    def _has_room(self, member: Member) -> bool:
        return self._most is None or member.load < self._most


def _pressure(member: Member) -> tuple[bool, float]:
    stats = member.stats
    if stats is None:
        return False, float(member.load)
    return member.load > 0 and stats.kv_used > KV_FULL, member.load / stats.slots


class EngineAssignment:
    """The way of one prompt's attempts to an engine. `settle` before every `generate`; `leave` after each attempt; `close` at the end."""

    def __init__(self, router: Router, attempts: int) -> None:
        self._router = router
        self._attempts = attempts  # still under way
        self._member: Member | None = None
        self._lost_to: set[int] = set()  # incarnations that were dead or died when it was on them
        self._killed: set[int] = set()  # those of them that had been alive when it came

    @property
    def losses(self) -> int:
        return len(self._lost_to)

    def assign(self) -> bool:
        """Be on an engine that takes work: the one it was on, if possible. False: there is none now."""
        if self._member is None or not self._member.in_rotation:
            self._move(self._router.choose())
        return self._member is not None

    def release(self) -> bool:
        """One of the attempts is over; whether somebody may wait for its room."""
        self._attempts -= 1
        if self._member is None:
            return False
        self._member.load -= 1
        return self._router.made_room(self._member)

    def close(self) -> None:
        self._move(None)

    async def generate(self, request: Request) -> Completion:
        assert self._member, "settled before"
        if self._router.hedge_after_s is None:
            return await self._on(self._member, request)
        return await self._hedged(self._member, request, self._router.hedge_after_s)

    def _move(self, target: Member | None) -> None:
        if self._member:
            self._member.load -= self._attempts
        if target:
            target.load += self._attempts
        self._member = target

    async def _on(self, member: Member, request: Request) -> Completion:
        alive = not self._lost_to
        try:
            if not alive:  # engines may have died together, with their machine: the prompt is innocent of those it finds dead
                await member.engine.stats()
                alive = True
            completion = await member.engine.generate(request)
        except WorkerDied as error:
            if not member.elastic:
                raise
            self._lost_to.add(member.incarnation)
            if alive:
                self._killed.add(member.incarnation)
            if len(self._killed) >= MAX_LOSSES:
                raise RolloutError(
                    f"{MAX_LOSSES} engines died while they generated request {request.id}; the last: {error}"
                ) from error
            return _handed_back(request)
        member.answers += completion.finish is not Finish.INTERRUPT
        return completion

    async def _hedged(self, member: Member, request: Request, after_s: float) -> Completion:
        """The first of two answers, the second started late and elsewhere. One that is interrupted counts only if both are."""
        tasks = [asyncio.ensure_future(self._on(member, request))]
        try:
            done, _ = await asyncio.wait(tasks, timeout=after_s)
            if not done and (other := self._router.choose(avoid=member)):
                tasks.append(
                    asyncio.ensure_future(self._on(other, replace(request, id=f"{request.id}+")))
                )
            best: Completion | None = None
            for task in asyncio.as_completed(tasks):
                completion = await task
                if completion.finish is not Finish.INTERRUPT:
                    return completion
                best = completion if best is None or len(completion) > len(best) else best
            assert best
            return best
        finally:
            for task in tasks:
                task.cancel()  # an engine's client aborts what nobody waits for any more


def _handed_back(request: Request) -> Completion:
    """What is known of an answer whose engine is gone: how far it was when it came there."""
    return (
        replace(request.partial, finish=Finish.INTERRUPT) if request.partial else empty_completion()
    )
