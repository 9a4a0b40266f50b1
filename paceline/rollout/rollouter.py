"""Runs groups: every attempt at a prompt through the environment, then the reward. Can be paused and resumed.

Waits for: the engines. Waited for by: the feed (while paused) and the synchroniser (while draining).
A group either comes back whole or raises; a failed attempt is never a sample with reward 0.
"""

import asyncio
import hashlib
import itertools
import math
from collections.abc import Sequence

from pydantic import AliasChoices, Field

from paceline.errors import RewardError, RolloutError, first_error
from paceline.queue.pulse import Pulse
from paceline.reward.reward import Reward
from paceline.rollout.engine import RolloutEngine
from paceline.rollout.environment import Environment, Generate
from paceline.settings import Settings
from paceline.types import Completion, Finish, Group, OnSync, Prompt, Request, Sampling, Trajectory


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
    generation_timeout: float = Field(120.0, gt=0)
    """Seconds one answer may take, from request to last token."""
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
        try:
            async with asyncio.TaskGroup() as attempts:
                tasks = [attempts.create_task(self._attempt(engine, seq, index, prompt)) for index in range(self._group_size)]
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        trajectories = [task.result() for task in tasks]
        rewards = await self._reward.score(prompt, trajectories)
        if len(rewards) != len(trajectories) or not all(math.isfinite(reward) for reward in rewards):
            raise RewardError(f"the reward of prompt {prompt.uid} gave {rewards!r}; expected {len(trajectories)} finite numbers")
        scored = tuple(trajectory.scored(reward) for trajectory, reward in zip(trajectories, rewards, strict=True))
        return Group(seq, prompt, scored, started, clock())

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

    async def _attempt(self, engine: RolloutEngine, seq: int, index: int, prompt: Prompt) -> Trajectory:
        return await self._environment.run(prompt, self._generate(engine, seq, index, prompt))

    def _generate(self, engine: RolloutEngine, seq: int, index: int, prompt: Prompt) -> Generate:
        turns = itertools.count()

        async def generate(context: tuple[int, ...]) -> Completion:
            seed = _seed(self._seed, seq, index, next(turns))
            completion: Completion | None = None
            try:
                async with asyncio.timeout(None if self.paused else self._timeout) as deadline:
                    self._deadlines[deadline] = self._timeout
                    while completion is None or completion.finish is Finish.INTERRUPT:
                        request = Request(f"{seq}.{index}.{next(self._ids)}", context, seed, self._sampling, completion)
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
