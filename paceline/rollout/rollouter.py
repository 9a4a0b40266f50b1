"""Runs groups: every attempt at a prompt through the environment, then the reward. Can be paused and resumed.

Waits for: the engines (one in rotation to take an attempt, then its answer). Waited for by: the feed (while paused) and the
synchroniser (while draining).
A group either comes back whole or raises; a failed attempt is never a sample with reward 0.
"""

import asyncio
import hashlib
import itertools
import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from paceline.errors import RewardError, RolloutError, first_error
from paceline.reward.reward import Reward
from paceline.rollout.environment import Environment, Generate
from paceline.rollout.fleet import Fleet
from paceline.rollout.router import EngineAssignment, Router
from paceline.rollout.vllm_settings import VllmSettings
from paceline.settings import Settings
from paceline.types import Completion, Finish, Group, OnSync, Prompt, Request, Sampling, Trajectory

log = logging.getLogger(__name__)

GREEDY = -1  # the attempt index of the greedy answer that some algorithms compare with


class RolloutSettings(Settings):
    engine: Literal["native", "vllm"] = "native"
    """What generates: our own engine, or vLLM (the extra "vllm")."""
    vllm: VllmSettings = VllmSettings()
    max_response_length: int = Field(
        64, ge=1, validation_alias=AliasChoices("max_response_length", "max_new_tokens")
    )
    """Tokens an answer may have."""
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0 = off."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer, besides the tokenizer's end tokens."""
    slots: int = Field(64, ge=1)
    """Sequences an engine decodes at the same time, if so many are under way."""
    kv_memory_fraction: float = Field(0.5, gt=0, le=1)
    """Share of a GPU's free memory that keys and values may take; no more is taken than `slots` can use."""
    generation_timeout: float = Field(120.0, gt=0)
    """Seconds one answer may take, from when an engine has taken its prompt to its last token."""
    min_group_size: int | None = Field(None, ge=1)
    """Attempts that must end in time for a group to count; the late ones are given up. Unset: all of them."""
    environment: str | None = None
    """An agent loop of your own (several turns, tools): a class as "file.py:Class" or "module:Class". Its turns, and what it shows the
    model in between, fit into data.max_prompt_length + max_response_length together. Unset: one question, one answer."""
    max_failed_groups: int = Field(0, ge=0)
    """Groups that may fail (counted, never trained) before the run ends."""


class Rollouter:
    def __init__(
        self,
        fleet: Fleet,
        environment: Environment,
        reward: Reward,
        sampling: Sampling,
        *,
        group_size: int,
        min_group_size: int | None = None,
        greedy_baseline: bool = False,
        seed: int,
        on_sync: OnSync,
        generation_timeout: float,
        hedge_after_s: float | None = None,
        slots: int | None = None,
    ) -> None:
        self.changed = fleet.changed
        self._holds: set[str] = set()  # who wants it to be paused
        self._fleet = fleet
        self._router = Router(
            fleet, hedge_after_s, slots and 2 * slots
        )  # so many again wait there, and no slot is ever idle
        self._environment = environment
        self._reward = reward
        self._sampling = sampling
        self._group_size = group_size
        self._may_fail = group_size - (min_group_size or group_size)
        self._greedy_baseline = greedy_baseline
        self._seed = seed
        self._on_sync = on_sync
        self._timeout = generation_timeout
        self._ids = itertools.count()
        self._stages: dict[int, str] = {}  # what becomes of a group just now
        self._deadlines: dict[
            asyncio.Timeout, float
        ] = {}  # of running generations -> seconds left when paused

    async def run(self, seq: int, prompt: Prompt) -> Group:
        """All attempts at one prompt, scored. Raises RolloutError or RewardError."""
        self._stages[seq] = "generated"
        try:
            return await self._run(seq, prompt)
        finally:
            del self._stages[seq]

    async def _run(self, seq: int, prompt: Prompt) -> Group:
        clock = asyncio.get_running_loop().time
        started = clock()
        assignment = EngineAssignment(self._router, self._group_size + self._greedy_baseline)
        await self._settle(assignment)
        late: list[RolloutError] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                started_tasks = [
                    tasks.create_task(self._attempt(assignment, seq, index, prompt, late))
                    for index in range(self._group_size)
                ]
                if self._greedy_baseline:
                    greedy = tasks.create_task(self._attempt(assignment, seq, GREEDY, prompt, late))
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        finally:
            assignment.close()
        trajectories = [
            trajectory for task in started_tasks if (trajectory := task.result()) is not None
        ]
        baseline = greedy.result() if self._greedy_baseline else None
        self._stages[seq] = "scored by the reward"
        scored = await self._score(prompt, trajectories + ([baseline] if baseline else []))
        return Group(
            seq,
            prompt,
            scored[: len(trajectories)],
            started,
            clock(),
            scored[-1].total_reward if baseline else None,
        )

    async def _score(
        self, prompt: Prompt, trajectories: list[Trajectory]
    ) -> tuple[Trajectory, ...]:
        scores = await self._reward.score(prompt, trajectories)
        named = [
            dict(score) if isinstance(score, Mapping) else {"reward": score} for score in scores
        ]
        if len(named) != len(trajectories) or not all(
            math.isfinite(number) for score in named for number in score.values()
        ):
            raise RewardError(
                f"the reward of prompt {prompt.uid} gave {scores!r}; expected {len(trajectories)} finite numbers"
            )
        return tuple(
            trajectory.scored(score.pop("reward"), score)
            for trajectory, score in zip(trajectories, named, strict=True)
        )

    def group_stages(self) -> list[str]:
        """What becomes of groups just now, in words."""
        return [
            f"{count} group(s) are being {what}"
            for what, count in Counter(self._stages.values()).items()
        ]

    @property
    def paused(self) -> bool:
        return bool(self._holds)

    def paused_by(self, who: str) -> bool:
        return who in self._holds

    async def pause_rollout(self, who: str = "user") -> bool:
        """Admit nothing new and, by `on_sync`, let running generations finish, interrupt them or hold them. Idempotent."""
        self._holds.add(who)
        await self._fleet.pause(self._on_sync)
        if not self.paused:
            return True  # it has been resumed before the last generation had ended
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:  # time spent paused is nobody's fault
            if (when := deadline.when()) is not None and not deadline.expired():
                self._deadlines[deadline] = max(0.0, when - now)
                deadline.reschedule(None)
        return True

    async def resume_rollout(self, who: str = "user") -> bool:
        """Go on where `pause_rollout` stopped, unless somebody else still wants it to be paused. Idempotent."""
        if who not in self._holds:
            return True
        self._holds.remove(who)
        if self._holds:
            return True
        await self._fleet.resume()
        if self._holds:
            return True  # it has been paused again
        now = asyncio.get_running_loop().time()
        for deadline, seconds in self._deadlines.items():
            if deadline.when() is None:
                deadline.reschedule(now + seconds)
        self.changed.notify_all()
        return True

    async def _settle(self, assignment: EngineAssignment) -> None:
        """Wait until the lane leads to an engine that takes work. No time of an answer passes here."""
        while self.paused or not assignment.assign():
            await self.changed.wait()

    async def _attempt(
        self,
        assignment: EngineAssignment,
        seq: int,
        index: int,
        prompt: Prompt,
        late: list[RolloutError],
    ) -> Trajectory | None:
        """One attempt; None when it failed and the group may go on without it."""
        try:
            return await self._environment.run(
                prompt, self._generate(assignment, seq, index, prompt)
            )
        except RolloutError as error:
            late.append(error)
            if len(late) > self._may_fail or index == GREEDY:
                raise
            log.warning("group %d goes on without one of its attempts: %s", seq, error)
            return None
        finally:
            if assignment.release():
                self.changed.notify_all()

    def _generate(
        self, assignment: EngineAssignment, seq: int, index: int, prompt: Prompt
    ) -> Generate:
        turns = itertools.count()
        sampling = replace(self._sampling, temperature=0.0) if index == GREEDY else self._sampling

        async def generate(context: tuple[int, ...]) -> Completion:
            seed = _seed(self._seed, seq, index, next(turns))
            completion: Completion | None = None
            left, losses = self._timeout, assignment.losses
            while completion is None or completion.finish is Finish.INTERRUPT:
                await self._settle(assignment)
                request = Request(
                    f"{seq}.{index}.{next(self._ids)}", context, seed, sampling, completion
                )
                try:
                    completion, left = await self._timed(assignment, request, left)
                except TimeoutError:
                    raise RolloutError(
                        f"attempt {index} at prompt {prompt.uid} took longer than rollout.generation_timeout = {self._timeout:g} s"
                    ) from None
                if assignment.losses > losses:  # it starts over, and so does its time
                    left, losses = self._timeout, assignment.losses
            if completion.finish is Finish.ABORT:
                raise RolloutError(
                    f"attempt {index} at prompt {prompt.uid} was aborted after {len(completion)} tokens"
                )
            return completion

        return generate

    async def _timed(
        self, assignment: EngineAssignment, request: Request, left: float
    ) -> tuple[Completion, float]:
        """A generation within the seconds its answer has left, and what is left then."""
        async with asyncio.timeout(left) as deadline:
            self._deadlines[deadline] = left
            try:
                completion = await assignment.generate(request)
                when = deadline.when()
                left = (
                    self._deadlines[deadline]
                    if when is None
                    else when - asyncio.get_running_loop().time()
                )
                return completion, max(0.0, left)
            finally:
                del self._deadlines[deadline]


def _seed(*parts: int) -> int:
    """One seed per (run, group, attempt, turn), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest())
