"""Runs groups: every attempt at a prompt through the environment, then the reward. Can be paused and resumed.

Waits for: the engines. Waited for by: the feed (while paused) and the synchroniser (while draining).
A group either comes back whole or raises; a failed attempt is never a sample with reward 0.
"""

import asyncio
import hashlib
import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from pydantic import AliasChoices, Field

from paceline.errors import RewardError, RolloutError, first_error
from paceline.queue.pulse import Pulse
from paceline.reward.reward import Reward
from paceline.rollout.engine import RolloutEngine
from paceline.rollout.environment import Environment, Generate
from paceline.settings import Settings
from paceline.types import Completion, Finish, Group, OnSync, Prompt, Request, Sampling, Trajectory

log = logging.getLogger(__name__)

GREEDY = -1  # the attempt index of the greedy answer that some algorithms compare with


class RolloutSettings(Settings):
    max_response_length: int = Field(64, ge=1, validation_alias=AliasChoices("max_response_length", "max_new_tokens"))
    """Tokens an answer may have."""
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0 = off."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, besides the tokenizer's end tokens."""
    slots: int = Field(64, ge=1)
    """Sequences an engine decodes at the same time."""
    kv_memory_fraction: float = Field(0.5, gt=0, le=1)
    """Share of a GPU's free memory that keys and values may take; no more is taken than `slots` can use."""
    generation_timeout: float = Field(120.0, gt=0)
    """Seconds one answer may take, from request to last token."""
    min_group_size: int | None = Field(None, ge=1)
    """Attempts that must end in time for a group to count; the late ones are given up. Unset: all of them."""
    max_failed_groups: int = Field(0, ge=0)
    """Groups that may fail (counted, never trained) before the run ends."""


class Rollouter:
    def __init__(
        self,
        engines: Sequence[RolloutEngine],
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
        changed: Pulse | None = None,
    ) -> None:
        self.paused = False
        self.changed = changed or Pulse()
        self._engines = engines
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
        self._deadlines: dict[asyncio.Timeout, float] = {}  # of running generations -> seconds left when paused

    async def run(self, seq: int, prompt: Prompt) -> Group:
        """All attempts at one prompt, scored. Raises RolloutError or RewardError."""
        clock = asyncio.get_running_loop().time
        started = clock()
        engine = self._engines[seq % len(self._engines)]
        late: list[RolloutError] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                started_tasks = [tasks.create_task(self._attempt(engine, seq, index, prompt, late)) for index in range(self._group_size)]
                if self._greedy_baseline:
                    greedy = tasks.create_task(self._attempt(engine, seq, GREEDY, prompt, late))
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        trajectories = [trajectory for task in started_tasks if (trajectory := task.result()) is not None]
        baseline = greedy.result() if self._greedy_baseline else None
        rewards = await self._score(prompt, trajectories + ([baseline] if baseline else []))
        scored = tuple(trajectory.scored(reward) for trajectory, reward in zip(trajectories, rewards, strict=False))
        return Group(seq, prompt, scored, started, clock(), rewards[-1] if baseline else None)

    async def _score(self, prompt: Prompt, trajectories: list[Trajectory]) -> list[float]:
        rewards = await self._reward.score(prompt, trajectories)
        if len(rewards) != len(trajectories) or not all(math.isfinite(reward) for reward in rewards):
            raise RewardError(f"the reward of prompt {prompt.uid} gave {rewards!r}; expected {len(trajectories)} finite numbers")
        return rewards

    async def pause_rollout(self) -> bool:
        """Admit nothing new and, by `on_sync`, let running generations finish, interrupt them or hold them. Idempotent."""
        self.paused = True
        await asyncio.gather(*(engine.pause(self._on_sync) for engine in self._engines))
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:  # time spent paused is nobody's fault
            if (when := deadline.when()) is not None and not deadline.expired():
                self._deadlines[deadline] = max(0.0, when - now)
                deadline.reschedule(None)
        return True

    async def resume_rollout(self) -> bool:
        """Go on where `pause_rollout` stopped. Idempotent."""
        await asyncio.gather(*(engine.resume() for engine in self._engines))
        self.paused = False
        now = asyncio.get_running_loop().time()
        for deadline, seconds in self._deadlines.items():
            if deadline.when() is None:
                deadline.reschedule(now + seconds)
        self.changed.fire()
        return True

    async def _attempt(self, engine: RolloutEngine, seq: int, index: int, prompt: Prompt, late: list[RolloutError]) -> Trajectory | None:
        """One attempt; None when it failed and the group may go on without it."""
        try:
            return await self._environment.run(prompt, self._generate(engine, seq, index, prompt))
        except RolloutError as error:
            late.append(error)
            if len(late) > self._may_fail or index == GREEDY:
                raise
            log.warning("group %d goes on without one of its attempts: %s", seq, error)
            return None

    def _generate(self, engine: RolloutEngine, seq: int, index: int, prompt: Prompt) -> Generate:
        turns = itertools.count()
        sampling = replace(self._sampling, temperature=0.0) if index == GREEDY else self._sampling

        async def generate(context: tuple[int, ...]) -> Completion:
            seed = _seed(self._seed, seq, index, next(turns))
            completion: Completion | None = None
            try:
                async with asyncio.timeout(None if self.paused else self._timeout) as deadline:
                    self._deadlines[deadline] = self._timeout
                    while completion is None or completion.finish is Finish.INTERRUPT:
                        request = Request(f"{seq}.{index}.{next(self._ids)}", context, seed, sampling, completion)
                        completion = await engine.generate(request)
            except TimeoutError:
                raise RolloutError(
                    f"attempt {index} at prompt {prompt.uid} took longer than rollout.generation_timeout = {self._timeout:g} s"
                ) from None
            finally:
                self._deadlines.pop(deadline, None)
            if completion.finish is Finish.ABORT:
                raise RolloutError(f"attempt {index} at prompt {prompt.uid} was aborted after {len(completion)} tokens")
            return completion

        return generate


def _seed(*parts: int) -> int:
    """One seed per (run, group, attempt, turn), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest())
