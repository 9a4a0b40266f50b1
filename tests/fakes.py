"""Fakes with the real protocols. The value of a token is the version of the weights that made it,
so that tests read the true staleness from the data."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from paceline.errors import StalledError, SyncError, WorkerDied
from paceline.loop import Evaluations, Loop, LoopSettings, Parts
from paceline.notifier import Notifier
from paceline.queue.admission import Admission
from paceline.queue.ledger import Ledger
from paceline.queue.message_queue import MessageQueue, MessageQueueClient
from paceline.rollout.engine import EngineStats
from paceline.rollout.environment import AgentLoop, SingleTurn
from paceline.rollout.fleet import Fleet
from paceline.rollout.quarantine import Quarantine
from paceline.rollout.rollouter import Rollouter
from paceline.schedule import ScheduleSettings
from paceline.sync.weights import Weights
from paceline.synchronizer import ParameterSynchronizer
from paceline.timeline import Timeline
from paceline.training.saving import Save
from paceline.types import (
    Batch,
    Completion,
    Finish,
    Group,
    OnSync,
    Prompt,
    Request,
    Sampling,
    Trajectory,
)


class FakeWorker:
    """The part of a worker that the fleet uses."""

    node = "local"

    def __init__(self, name: str) -> None:
        self.name = name
        self.fenced = 0

    @cached_property
    def died(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    def fence(self, error: WorkerDied) -> None:
        if not self.died.done():
            self.died.set_exception(error)
            self.died.exception()


class FakeEngine:
    """Engine that generates tokens in virtual time; a token's value is the version of the weights.

    `die` acts like SIGKILL, `freeze` like SIGSTOP and `thaw` like SIGCONT.
    """

    def __init__(self, rng: random.Random, mean_s: float = 1.0, name: str = "rollout") -> None:
        self.worker = FakeWorker(name)
        self.version = 0
        self.tokens = 0
        self.resumed = 0  # tokens of partial completions in requests
        self.seen: list[str] = []  # request IDs
        self.running: dict[str, dict[str, Any]] = {}
        self.fail_loads = 0
        self.load_s = 0.1
        self._rng = rng
        self._mean_s = mean_s
        self._open = True
        self._held = False
        self._frozen = False
        self._moved = Notifier()

    @property
    def weights(self) -> int:
        """Version of the weights that generate tokens."""
        return self.version

    def accepted(self, request_id: str) -> bool:
        return request_id in self.seen

    def die(self) -> None:
        self.worker.fence(WorkerDied(f"worker {self.worker.name!r} died"))

    def freeze(self) -> None:
        self._frozen = True

    def thaw(self) -> None:
        self._frozen = False
        self._moved.notify_all()

    async def generate(self, request: Request) -> Completion:
        while not self._open:
            await self._moved_or_died()
        self._check()
        task = asyncio.ensure_future(self._produce(request))
        try:
            await asyncio.wait({task, self.worker.died}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        self._check()
        return task.result()

    async def _produce(self, request: Request) -> Completion:
        tokens = list(request.partial.tokens) if request.partial else []
        versions = list(request.partial.versions) if request.partial else []
        state: dict[str, Any] = {"end": None, "tokens": tokens, "versions": versions}
        self.seen.append(request.id)
        self.resumed += len(tokens)
        self.running[request.id] = state
        length = max(len(tokens) + 1, min(request.sampling.max_new_tokens, self._length(request)))
        try:
            while len(tokens) < length and state["end"] is None:
                seconds = self._rng.expovariate(1 / self._mean_s)
                await asyncio.sleep(seconds * (8 if self._rng.random() < 0.02 else 1))
                while (self._held and state["end"] is None) or self._frozen:
                    await self._moved.wait()
                if state["end"] is None:
                    tokens.append(self._token(request, len(tokens)))
                    versions.append(self.version)
                    self.tokens += 1
        finally:
            del self.running[request.id]
            self._moved.notify_all()
        if self.worker.died.done():
            self.worker.fenced += 1
        return _completion(tokens, versions, state["end"] or Finish.STOP)

    def _length(self, request: Request) -> int:
        return 1 + int(self._rng.expovariate(0.25))

    def _token(self, request: Request, position: int) -> int:
        return self.weights

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request_id in self.running:
                self.running[request_id]["end"] = Finish.ABORT

    async def pause(self, mode: OnSync) -> bool:
        self._open = False
        await self._reply()
        if mode is OnSync.SWAP:
            self._held = True
            return True
        if mode is OnSync.INTERRUPT:
            for state in self.running.values():
                state["end"] = Finish.INTERRUPT
            self._moved.notify_all()
        while self.running and not self._open:
            await self._moved_or_died()
        return True

    async def resume(self) -> bool:
        await self._reply()
        self._held = False
        self._open = True
        self._moved.notify_all()
        return True

    async def load_weights(self, weights: Weights) -> None:
        await asyncio.wait({self.worker.died}, timeout=self._rng.random() * self.load_s)
        await self._reply()
        if self.fail_loads:
            self.fail_loads -= 1
            raise SyncError("planted")
        assert weights.version >= self.version, "the engine loaded older weights"
        self.version = weights.version

    async def partials(self) -> list[tuple[str, Completion]]:
        await self._reply()
        return [
            (request_id, _completion(state["tokens"], state["versions"], Finish.INTERRUPT))
            for request_id, state in self.running.items()
        ]

    async def stats(self) -> EngineStats:
        await self._reply()
        return EngineStats(self.version, len(self.running), 0, self.tokens, 0.0, not self._open)

    async def close(self) -> None:
        return

    async def _reply(self) -> None:
        """Wait while frozen; raise WorkerDied if dead."""
        self._check()
        while self._frozen:
            await self._moved_or_died()

    async def _moved_or_died(self) -> None:
        moved = asyncio.ensure_future(self._moved.wait())
        try:
            await asyncio.wait({moved, self.worker.died}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()
        self._check()

    def _check(self) -> None:
        if self.worker.died.done():
            self.worker.died.result()


class SteadyEngine(FakeEngine):
    """Makes 20 tokens, the most that a world asks for, each in exactly the same time."""

    class _Even(random.Random):
        def expovariate(self, lambd: float = 1.0) -> float:
            return 1 / lambd

        def random(self) -> float:
            return 1.0

    def __init__(self, rng: random.Random, mean_s: float = 1.0, name: str = "rollout") -> None:
        super().__init__(self._Even(), mean_s, name)

    def _length(self, request: Request) -> int:
        return 20


def _completion(tokens: list[int], versions: list[int], finish: Finish) -> Completion:
    zeros = np.zeros(len(tokens), np.float32)
    return Completion(np.array(tokens, np.int32), zeros, np.array(versions, np.int32), finish)


class FakeTransport:
    async def publish(self, version: int) -> Weights:
        await asyncio.sleep(0.01)
        return Weights(version)

    async def attach(self, worker: Any) -> None:
        await asyncio.sleep(0.01)


class FakeSource:
    def __init__(self) -> None:
        self.observed: list[int] = []

    def __getitem__(self, seq: int) -> Prompt:
        return Prompt(f"p{seq}", (seq,), str(seq), {})

    def observe(self, groups: Sequence[Group]) -> None:
        self.observed += [group.seq for group in groups]


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


class RecordingObserver:
    """Observer that keeps everything it is given."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.groups: list[Group] = []

    def step_done(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        self.rows.append(metrics)
        self.groups += groups

    def engines_polled(self, engines: Sequence[EngineStats], queue_utilization: float) -> None:
        return


@dataclass
class World:
    """The real loop with a fake engine, trainer, reward and transport."""

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
    episode_timeout_s: float | None = None
    stall_timeout_s: float = 1e4
    step_timeout_s: float = 0.0
    elastic: bool = False
    make_engine: type[FakeEngine] = FakeEngine
    start_s: float = 5.0
    start_failures: int = 0
    max_restarts: int = 3
    heartbeat_timeout_s: float = 20.0
    hedge_after_s: float | None = None
    slots: int | None = None
    quarantine: Quarantine | None = None
    score: Callable[[Prompt], list[float] | None] | None = None
    environment: AgentLoop = field(default_factory=lambda: SingleTurn(str))
    takes_turns: bool = False
    save_every: int = 0
    save: Save | None = None
    guards: Sequence[tuple[str, asyncio.Future[None]]] = ()
    check_weights: Callable[[Sequence[Group], int], Awaitable[None]] | None = None
    make_evaluations: "Callable[[World], Evaluations] | None" = None
    report_stall: Callable[[str], StalledError] | None = None
    timeline: Timeline | None = None

    def build(self, ledger: Ledger | None = None) -> Loop:
        rng = random.Random(self.seed)
        self.rng = rng
        self.engines = [
            self.make_engine(rng, self.engine_s, f"rollout-{number}")
            for number in range(self.num_engines)
        ]
        self.fleet = Fleet(
            self.engines,  # type: ignore[arg-type]
            launch=self._launch if self.elastic else None,  # type: ignore[arg-type]
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            # Engines that cannot be replaced have no deadline: fewer heartbeats, faster tests.
            heartbeat_s=1.0 if self.elastic else 5.0,
            max_restarts=self.max_restarts,
        )
        self.source = FakeSource()
        self.reward = FakeReward(self.score)
        self.trainer = FakeTrainer(rng, self.train_s)
        self.observer = RecordingObserver()
        self.ledger = ledger or Ledger()
        self.queue = MessageQueue(self.max_queue_size, changed=self.fleet.changed)
        self.admission = Admission(
            self.schedule.capacity(self.groups_per_step), self.fleet.changed, self.max_queue_size
        )
        self.rollouter = Rollouter(
            self.fleet,
            self.environment,
            self.reward,
            Sampling(max_new_tokens=20),
            group_size=self.group_size,
            min_group_size=self.min_group_size,
            greedy_baseline=self.greedy_baseline,
            seed=self.seed,
            on_sync=self.schedule.on_sync,
            generation_timeout=self.generation_timeout,
            episode_timeout_s=self.episode_timeout_s,
            hedge_after_s=self.hedge_after_s,
            slots=self.slots,
            quarantine=self.quarantine,
        )
        self.synchronizer = ParameterSynchronizer(
            FakeTransport(),
            self.fleet,
            self.rollouter,
            self.schedule.on_sync,
            takes_turns=self.takes_turns,
        )
        self.saves: list[int] = []

        async def save(step: int, copied: Callable[[], None] | None) -> None:
            self.saves.append(step)

        parts = Parts(
            settings=LoopSettings(
                steps=self.steps,
                groups_per_step=self.groups_per_step,
                sync_every=self.schedule.sync_every,
                save_every=self.save_every,
                max_failed_groups=self.max_failed_groups,
                dynamic_sampling=self.dynamic_sampling,
                stall_timeout_s=self.stall_timeout_s,
                step_timeout_s=self.step_timeout_s,
                episode_timeout_s=self.episode_timeout_s or 10 * self.generation_timeout,
                takes_turns=self.takes_turns,
            ),
            source=self.source,
            rollouter=self.rollouter,
            fleet=self.fleet,
            queue=MessageQueueClient(self.queue, self.schedule.max_staleness),
            admission=self.admission,
            ledger=self.ledger,
            trainer=self.trainer,
            synchronizer=self.synchronizer,
            observer=self.observer,
            save=self.save or save,
            guards=self.guards,
            check_weights=self.check_weights,
            evaluations=self.make_evaluations(self) if self.make_evaluations else None,
            report_stall=self.report_stall,
            timeline=self.timeline or Timeline(),
        )
        self.loop = Loop(parts)
        return self.loop

    async def _launch(self, name: str) -> FakeEngine:
        await asyncio.sleep(self.start_s * (0.5 + self.rng.random()))
        if self.start_failures:
            self.start_failures -= 1
            raise WorkerDied(f"worker {name!r} died while starting (planted)")
        engine = self.make_engine(self.rng, self.engine_s, name)
        self.engines.append(engine)
        return engine
