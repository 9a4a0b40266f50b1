"""One simulated run: the real loop, rollouter, router, queue, admission and ledger in virtual time.

Only the engines, the trainer, the weight transport and the environment are simulated.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.collection import collection_paused
from paceline.errors import ConfigError
from paceline.loop import Loop, LoopSettings, Metrics, Parts
from paceline.queue.admission import Admission
from paceline.queue.ledger import Ledger
from paceline.queue.message_queue import MessageQueue, MessageQueueClient
from paceline.remote.worker import Worker
from paceline.reward.reward import NoReward
from paceline.rollout.client import EngineClient
from paceline.rollout.engine import EngineStats
from paceline.rollout.environment import Generate
from paceline.rollout.fleet import Fleet
from paceline.rollout.rollouter import Rollouter
from paceline.schedule import ScheduleSettings
from paceline.simulator.clock import NEVER_S, run_virtual
from paceline.simulator.costs import CostModel
from paceline.simulator.engine import BusySeconds, SimulatedWorker
from paceline.simulator.lengths import Distribution, read_distribution
from paceline.sync.settings import SyncSettings
from paceline.sync.weights import Weights
from paceline.synchronizer import ParameterSynchronizer
from paceline.types import Batch, Group, Prompt, Sampling, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to simulate: the load, the schedule and the devices of one mode."""

    costs: CostModel
    lengths: Distribution  # of completions, in tokens
    schedule: ScheduleSettings
    prompt_tokens: int = 100
    steps: int = 20
    groups_per_step: int = 16
    group_size: int = 8
    greedy_baseline: bool = False  # a completion more per group, which is not trained
    engines: int = 1
    engine_devices: int = 1  # of each engine
    train_devices: int = 1
    critic_devices: int = 0  # of a separate pool that trains the critic
    has_critic: bool = False
    shared: bool = False  # the engines are on the devices that train
    overlap: bool = False  # and generate while these train
    copies_weights: bool = True  # otherwise engines read the trainer's parameters
    slots: int = 1024
    max_queue_size: int | None = None
    seed: int = 0

    @property
    def devices(self) -> int:
        generating = 0 if self.shared else self.engines * self.engine_devices
        return generating + self.train_devices + self.critic_devices

    @property
    def generated(self) -> int:
        """Completions of a group."""
        return self.group_size + self.greedy_baseline

    @property
    def takes_turns(self) -> bool:
        return self.shared and not self.overlap


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a simulated run, without its first steps."""

    steps_per_s: float
    tokens_per_s: float  # of trained completions
    step_s: float
    wait_s: float  # in which the trainer waits for groups, per step
    train_s: float  # per step
    sync_s: float  # per step
    generate_s: float  # of all engines' devices, decode and prefill, per step
    completion_tokens: float  # mean length of a trained completion
    staleness_mean: float
    staleness_max: int
    device_use: float  # fraction of all device time that computes
    engines_idle: float  # fraction of the engines' device time without work
    replaced_engines: int
    groups: dict[str, Any]  # of the ledger, in the whole run


def simulate(scenario: Scenario) -> Outcome:
    """Simulate a run. It needs no event loop and takes little real time."""
    with collection_paused():  # it would take a third of the time
        outcome: Outcome = run_virtual(_Simulation(scenario).run(), NEVER_S)
        return outcome


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._random = random.Random(scenario.seed)
        self._workers: list[SimulatedWorker] = []
        costs = scenario.costs
        if not scenario.copies_weights:
            costs = costs.model_copy(update={"load_s": 0.0, "publish_s": 0.0})
        self._costs = costs

    async def run(self) -> Outcome:
        scenario = self._scenario
        engines = [self._engine(f"rollout-{number}") for number in range(scenario.engines)]
        fleet = Fleet(
            engines,
            launch=None if scenario.shared else self._launch,
            max_restarts=10**9,
            heartbeat_s=NEVER_S,
        )
        rollouter = Rollouter(
            fleet,
            _Environment(self._costs),
            NoReward(),
            Sampling(max_new_tokens=2**31),
            group_size=scenario.group_size,
            greedy_baseline=scenario.greedy_baseline,
            seed=scenario.seed,
            on_sync=scenario.schedule.on_sync,
            generation_timeout=NEVER_S,
            slots=scenario.slots,
        )
        recorder = _Recorder(self._busy, self._warm_up)
        ledger = Ledger()
        loop = self._loop(fleet, rollouter, ledger, recorder)
        await loop.run()
        return self._outcome(recorder, ledger, fleet)

    @property
    def _warm_up(self) -> int:
        """Steps until the pipeline is full. They are not measured."""
        return min(self._scenario.steps - 1, 1 + self._scenario.schedule.max_staleness)

    def _loop(
        self, fleet: Fleet, rollouter: Rollouter, ledger: Ledger, recorder: "_Recorder"
    ) -> Loop:
        scenario, schedule = self._scenario, self._scenario.schedule
        capacity = schedule.capacity(scenario.groups_per_step)
        queue_size = scenario.max_queue_size or capacity
        queue = MessageQueue(queue_size, changed=fleet.changed)

        async def save(step: int, copied: Callable[[], None] | None) -> None:
            return None

        parts = Parts(
            settings=LoopSettings(
                steps=scenario.steps,
                groups_per_step=scenario.groups_per_step,
                sync_every=schedule.sync_every,
                max_failed_groups=10**9,
                stall_timeout_s=NEVER_S,
                takes_turns=scenario.takes_turns,
            ),
            source=_Source(scenario.prompt_tokens),
            rollouter=rollouter,
            fleet=fleet,
            queue=MessageQueueClient(queue, schedule.max_staleness),
            admission=Admission(capacity, fleet.changed, queue_size),
            ledger=ledger,
            trainer=_Trainer(scenario, self._costs, self._workers),
            synchronizer=ParameterSynchronizer(
                _Transport(self._costs.publish_s),
                fleet,
                rollouter,
                schedule.on_sync,
                SyncSettings(timeout_s=NEVER_S, straggler_timeout_s=NEVER_S),
                takes_turns=scenario.takes_turns and schedule.max_staleness > 0,
            ),
            observer=recorder,
            save=save,
        )
        return Loop(parts)

    def _engine(self, name: str) -> EngineClient:
        scenario = self._scenario
        worker = SimulatedWorker(name, self._costs, scenario.lengths, scenario.slots)
        self._workers.append(worker)
        rate = self._costs.failures_per_hour / 3600
        if rate and not scenario.shared:
            delay = self._random.expovariate(rate)
            asyncio.get_running_loop().call_later(delay, worker.die)
        return EngineClient(worker)

    async def _launch(self, name: str) -> EngineClient:
        await asyncio.sleep(self._costs.restart_s)
        return self._engine(name)

    def _busy(self) -> BusySeconds:
        engines = [worker.engine.busy for worker in self._workers]
        return BusySeconds(
            sum(busy.decode for busy in engines),
            sum(busy.prefill for busy in engines),
            sum(busy.load for busy in engines),
        )

    def _outcome(self, recorder: "_Recorder", ledger: Ledger, fleet: Fleet) -> Outcome:
        scenario, rows = self._scenario, recorder.rows[self._warm_up :]
        wall = recorder.ends[-1] - recorder.warm_s
        if wall <= 0:
            raise ConfigError(
                "--costs: the simulated steps take no time; expected a cost of generation or "
                "training above 0"
            )
        wait, train, sync = (
            sum(row[f"time/{name}_s"] for row in rows) for name in ("wait", "train", "sync")
        )
        busy, warm = self._busy(), recorder.warm_busy
        generated = (busy.total - warm.total) * scenario.engine_devices
        loaded = (busy.load - warm.load) * scenario.engine_devices
        completions = len(rows) * scenario.groups_per_step * scenario.group_size
        trained = sum(row["busy_s"] for row in rows)
        elsewhere = sum(row["critic_s"] for row in rows)
        engine_time = scenario.engines * scenario.engine_devices * wall
        idle = engine_time - generated - (trained - elsewhere if scenario.shared else 0.0)
        return Outcome(
            steps_per_s=len(rows) / wall,
            tokens_per_s=sum(row["tokens"] for row in rows) / wall,
            step_s=wall / len(rows),
            wait_s=wait / len(rows),
            train_s=train / len(rows),
            sync_s=sync / len(rows),
            generate_s=(generated - loaded) / len(rows),
            completion_tokens=sum(row["tokens"] for row in rows) / completions,
            staleness_mean=sum(row["staleness/mean"] for row in rows) / len(rows),
            staleness_max=round(max(row["staleness/max"] for row in recorder.rows)),
            # An engine accounts for a prefill when it starts, so the last one may count too early.
            device_use=min(1.0, (generated + trained) / (scenario.devices * wall)),
            engines_idle=max(0.0, idle) / engine_time,
            replaced_engines=fleet.replaced,
            groups=ledger.counts(),
        )


class _Trainer:
    """Trainer whose steps take the time of their tokens."""

    def __init__(
        self, scenario: Scenario, costs: CostModel, workers: Sequence[SimulatedWorker]
    ) -> None:
        self._scenario, self._costs, self._workers = scenario, costs, workers

    async def step(self, batch: Batch, step: int) -> Metrics:
        scenario, costs, prompt = self._scenario, self._costs, self._scenario.prompt_tokens
        again = len(batch.offsets) - 1 - scenario.groups_per_step  # rows whose prompt is shared
        tokens = int(batch.tokens.sum()) - again * prompt
        context = 0.0
        if costs.train_context_s:
            rows = np.add.reduceat(batch.tokens, batch.offsets[:-1], dtype=np.float64)
            context = float((rows**2).sum() - again * prompt**2) / 2
        if costs.host_trained_s:
            await asyncio.sleep(costs.host_trained_s * (len(batch.offsets) - 1))
        actor = costs.train_s(tokens, scenario.train_devices, context=context)
        critic, critic_devices = 0.0, scenario.critic_devices or scenario.train_devices
        if scenario.has_critic:
            critic = costs.train_s(tokens, critic_devices, costs.critic_factor, context)
        busy = actor * scenario.train_devices + critic * critic_devices
        both = max(actor, critic) if scenario.critic_devices else actor + critic
        if scenario.overlap and actor > 0:
            # In one process, the controller delays what the trainer does on the host, which does
            # not depend on the batch: it starts operations of the device.
            completions = scenario.groups_per_step * scenario.generated
            both += costs.host_completion_s * completions * costs.train_step_s / actor
        if scenario.overlap:
            busy = await self._beside_engine(both, costs.overlap_decode, costs.overlap_train)
        elif self._slows_engine and both > 0:
            begun = asyncio.get_running_loop().time()
            await self._beside_engine(both, costs.pool_decode, costs.pool_train)
            busy *= (asyncio.get_running_loop().time() - begun) / both
        else:
            await asyncio.sleep(both + (2 * costs.switch_s if scenario.takes_turns else 0.0))
        return {
            "busy_s": busy,  # of all training devices
            "critic_s": critic * scenario.critic_devices,  # of them, in the critic's pool
            "tokens": float(batch.tokens[batch.mask].sum()),
        }

    @property
    def _slows_engine(self) -> bool:
        """Whether a separate pool and this one slow each other down. It has one engine then."""
        scenario, costs = self._scenario, self._costs
        slow = max(costs.pool_decode, costs.pool_train) > 1
        return slow and not scenario.shared and scenario.engines == 1

    async def _beside_engine(self, left: float, decode: float, train: float) -> float:
        """Train beside an engine: each slows the other down by its factor while both work.

        Return the seconds in which only the trainer worked.
        """
        engine, clock = self._workers[-1].engine, asyncio.get_running_loop().time
        started, generated = clock(), engine.busy.total
        engine.set_slowdown(decode)
        while left > 1e-9:
            factor, begun = (train if engine.generating else 1.0), clock()
            try:
                async with asyncio.timeout(left * factor):
                    while engine.generating == (factor != 1.0) or train == 1:
                        await engine.changed.wait()
            except TimeoutError:
                break
            left -= (clock() - begun) / factor
        engine.set_slowdown(1.0)
        return max(0.0, clock() - started - (engine.busy.total - generated))


class _Transport:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def publish(self, version: int) -> Weights:
        await asyncio.sleep(self._seconds)
        return Weights(version)

    async def attach(self, engine: Worker) -> None:
        return


class _Source:
    def __init__(self, prompt_tokens: int) -> None:
        self._tokens = prompt_tokens

    def __getitem__(self, seq: int) -> Prompt:
        return Prompt(str(seq), (self._tokens,), "", {})

    def observe(self, groups: Sequence[Group]) -> None:
        return


class _Environment:
    """Agent loop with some generations, each followed by tools that take time.

    The controller then handles the completion; it handles one at a time.
    """

    def __init__(self, costs: CostModel) -> None:
        self._turns, self._host_s = costs.turns, costs.host_completion_s
        self._free_at = 0.0  # when the controller has handled all completions
        self._seconds = read_distribution(costs.environment_s, "environment_s")
        self._calls = 0

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        turns: list[Turn] = []
        context = prompt.tokens
        for _ in range(self._turns):
            completion = await generate(context)
            turns.append(Turn(() if turns else context, completion))
            context += (sum(completion.tokens.tolist()),)  # few, so faster than numpy
            self._calls += 1
            if (seconds := self._seconds[self._calls]) > 0:
                await asyncio.sleep(seconds)
        if self._host_s:
            now = asyncio.get_running_loop().time()
            self._free_at = max(self._free_at, now) + self._host_s
            await asyncio.sleep(self._free_at - now)
        return Trajectory(tuple(turns), "")


class _Recorder:
    """Observer that keeps the metrics and the times of the steps."""

    def __init__(self, busy: Callable[[], BusySeconds], warm_up: int) -> None:
        self.rows: list[Metrics] = []
        self.ends: list[float] = []
        self.warm_s, self.warm_busy = 0.0, BusySeconds()
        self._busy, self._warm_up = busy, warm_up

    def step_done(self, step: int, metrics: Metrics, groups: Sequence[Group]) -> None:
        self.rows.append(metrics)
        self.ends.append(asyncio.get_running_loop().time())
        if step == self._warm_up:
            self.warm_s, self.warm_busy = self.ends[-1], self._busy()

    def engines_polled(self, engines: Sequence[EngineStats], queue_utilization: float) -> None:
        return
