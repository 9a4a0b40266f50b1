"""Stand-ins that keep the real protocols and stamp the truth into their data: a token's value is the version that made it."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.errors import SyncError
from paceline.loop import Loop, LoopSettings
from paceline.queue.admission import Admission
from paceline.queue.ledger import Ledger
from paceline.queue.message_queue import MessageQueue
from paceline.queue.pulse import Pulse
from paceline.rollout.engine import EngineStats
from paceline.rollout.environment import SingleTurn
from paceline.rollout.rollouter import Rollouter
from paceline.schedule import ScheduleSettings
from paceline.sync.synchronizer import ParameterSynchronizer
from paceline.sync.weights import Weights
from paceline.types import Batch, Completion, Finish, Group, OnSync, Prompt, Request, Sampling, Trajectory


class FakeEngine:
    """Makes tokens in virtual time. Token value = version of the weights at that moment, so staleness can be read off the data."""

    def __init__(self, rng: random.Random, mean_s: float = 1.0) -> None:
        self.version = 0
        self.tokens = 0
        self.running: dict[str, dict[str, Any]] = {}
        self.fail_loads = 0
        self._rng = rng
        self._mean_s = mean_s
        self._open = asyncio.Event()
        self._open.set()
        self._held = False
        self._idle = Pulse()

    async def generate(self, request: Request) -> Completion:
        await self._open.wait()
        tokens = list(request.partial.tokens) if request.partial else []
        versions = list(request.partial.versions) if request.partial else []
        state: dict[str, Any] = {"end": None}
        self.running[request.id] = state
        length = max(len(tokens) + 1, min(request.sampling.max_new_tokens, 1 + int(self._rng.expovariate(0.25))))
        try:
            while len(tokens) < length and state["end"] is None:
                await asyncio.sleep(self._rng.expovariate(1 / self._mean_s) * (8 if self._rng.random() < 0.02 else 1))
                while self._held and state["end"] is None:
                    await self._idle.wait()
                if state["end"] is None:
                    tokens.append(self.version)
                    versions.append(self.version)
                    self.tokens += 1
        finally:
            del self.running[request.id]
            self._idle.fire()
        array = np.array(versions, np.int32)
        return Completion(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), array, state["end"] or Finish.STOP)

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request_id in self.running:
                self.running[request_id]["end"] = Finish.ABORT

    async def pause(self, mode: OnSync) -> bool:
        self._open.clear()
        if mode is OnSync.SWAP:
            self._held = True
            return True
        if mode is OnSync.INTERRUPT:
            for state in self.running.values():
                state["end"] = Finish.INTERRUPT
        while self.running:
            await self._idle.wait()
        return True

    async def resume(self) -> bool:
        self._held = False
        self._open.set()
        self._idle.fire()
        return True

    async def load_weights(self, weights: Weights) -> None:
        await asyncio.sleep(self._rng.random() * 0.1)
        if self.fail_loads:
            self.fail_loads -= 1
            raise SyncError("planted")
        self.version = weights.version

    async def stats(self) -> EngineStats:
        return EngineStats(self.version, len(self.running), 0, self.tokens, 0.0, not self._open.is_set())

    async def close(self) -> None:
        return


class FakeTransport:
    async def publish(self, version: int) -> Weights:
        await asyncio.sleep(0.01)
        return Weights(version)


class FakeSource:
    def __getitem__(self, seq: int) -> Prompt:
        return Prompt(f"p{seq}", (seq,), str(seq), {})

    def observe(self, groups: Sequence[Group]) -> None:
        return


class FakeReward:
    def __init__(self, score: Callable[[Prompt], list[float] | None] | None = None) -> None:
        self._score = score

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[float]:
        await asyncio.sleep(0.05)
        scores = self._score(prompt) if self._score else None
        return scores[: len(trajectories)] if scores is not None else [1.0] * len(trajectories)

    async def close(self) -> None:
        return


@dataclass
class FakeTrainer:
    rng: random.Random
    mean_s: float = 2.0
    batches: list[Batch] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    async def step(self, batch: Batch, step: int) -> dict[str, float]:
        await asyncio.sleep(self.rng.expovariate(1 / self.mean_s))
        self.batches.append(batch)
        self.steps.append(step)
        return {}


class Notes:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.groups: list[Group] = []

    def step_done(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        self.rows.append(metrics)
        self.groups += groups

    def looked(self, engines: Sequence[EngineStats], queue_utilisation: float) -> None:
        return


@dataclass
class World:
    """The real loop with fakes at its edges."""

    seed: int = 0
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    steps: int = 6
    groups_per_step: int = 3
    group_size: int = 2
    num_engines: int = 1
    max_queue_size: int = 1000
    engine_s: float = 1.0
    train_s: float = 2.0
    max_failed_groups: int = 0
    dynamic_sampling: bool = False
    min_group_size: int | None = None
    greedy_baseline: bool = False
    generation_timeout: float = 1e5
    stall_timeout_s: float = 1e4
    score: Callable[[Prompt], list[float] | None] | None = None
    guards: Sequence[tuple[str, asyncio.Future[None]]] = ()

    def build(self, ledger: Ledger | None = None) -> Loop:
        rng = random.Random(self.seed)
        changed = Pulse()
        self.engines = [FakeEngine(rng, self.engine_s) for _ in range(self.num_engines)]
        self.trainer = FakeTrainer(rng, self.train_s)
        self.notes = Notes()
        self.ledger = ledger or Ledger()
        self.queue = MessageQueue(self.max_queue_size, self.schedule.max_staleness, changed=changed)
        self.admission = Admission(self.schedule.capacity(self.groups_per_step), changed)
        self.rollouter = Rollouter(
            self.engines,
            SingleTurn(str),
            FakeReward(self.score),
            Sampling(max_new_tokens=20),
            group_size=self.group_size,
            min_group_size=self.min_group_size,
            greedy_baseline=self.greedy_baseline,
            seed=self.seed,
            on_sync=self.schedule.on_sync,
            generation_timeout=self.generation_timeout,
            changed=changed,
        )
        self.synchronizer = ParameterSynchronizer(FakeTransport(), self.engines, self.rollouter, self.schedule.on_sync)
        self.saves: list[int] = []

        async def save(step: int) -> None:
            self.saves.append(step)

        self.loop = Loop(
            LoopSettings(
                steps=self.steps,
                groups_per_step=self.groups_per_step,
                sync_every=self.schedule.sync_every,
                max_failed_groups=self.max_failed_groups,
                dynamic_sampling=self.dynamic_sampling,
                stall_timeout_s=self.stall_timeout_s,
            ),
            source=FakeSource(),
            rollouter=self.rollouter,
            engines=self.engines,
            queue=self.queue,
            admission=self.admission,
            ledger=self.ledger,
            trainer=self.trainer,
            synchronizer=self.synchronizer,
            observer=self.notes,
            save=save,
            guards=self.guards,
        )
        return self.loop
