"""Reads the clocks of all workers and keeps the device-time ledger of a run.

The clocks arrive with the replies of the workers, so reading them costs no message. The ledger of a
step covers the reports that arrived since the step before.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.config import RunConfig
from paceline.generation import Generation
from paceline.observe.device_time import DeviceTime, DeviceUse, account, saturated_rate
from paceline.remote.device_clock import DISCARDED, ClockReport
from paceline.remote.group import ranks_of
from paceline.remote.worker import Worker
from paceline.timeline import Timeline
from paceline.types import Role
from paceline.workers.cluster import PlannedWorker
from paceline.workers.pools import unique_workers

REFRESH_TIMEOUT_S = 10.0
TRAINED = {Role.ACTOR, Role.CRITIC, Role.REF, Role.REWARD}


@dataclass(frozen=True, slots=True)
class Metered:
    """A worker with one device, or a rank of a group."""

    name: str
    device: str
    pool: str
    roles: Collection[Role]
    worker: Worker  # whose clock counts; for a rank of an engine, the one that leads it
    ranks: int = 1  # of the engine


def metered_workers(config: RunConfig, generation: Generation) -> list[Metered]:
    """Return the workers of a run that are alive, rank by rank, with their devices."""
    plans = {plan.name: plan for plan in generation.plans}
    workers = {worker.name: worker for worker in unique_workers(generation.workers)}
    workers = {name: worker for name, worker in workers.items() if not worker.died.done()}
    workers |= {m.engine.worker.name: m.engine.worker for m in generation.fleet if m.elastic}
    found = []
    for name, worker in workers.items():
        plan = plans.get(name) or PlannedWorker(
            name, (Role.ROLLOUT,), pool=config.placement.pool(Role.ROLLOUT)
        )
        ranks = ranks_of(worker)
        size = config.rollout.ranks if Role.ROLLOUT in plan.roles else 1
        for number, rank in enumerate(ranks):
            device = str(plan.devices[number]) if number < len(plan.devices) else rank.name
            leader = ranks[number // size * size]
            found.append(Metered(rank.name, device, plan.pool, plan.roles, leader, size))
    return found


async def refresh(workers: Iterable[Metered]) -> None:
    """Get a report of each clock now; ignore workers that fail or do not reply in time."""
    calls = [each.worker.call("host", "pid") for each in workers]
    waiting = [asyncio.wait_for(call, REFRESH_TIMEOUT_S) for call in calls]
    await asyncio.gather(*waiting, return_exceptions=True)


@dataclass(slots=True)
class _Reading:
    """What is known of a worker's clock, and the time of the controller up to which it counts."""

    until: float
    report: ClockReport | None = None
    absent: float = 0.0


@dataclass(slots=True)
class _Totals:
    """Counters of one device since the start of the run."""

    pool: str
    roles: set[Role]
    elapsed: dict[str, float] = field(default_factory=dict)  # by worker
    absent: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)

    def use(self, before: "_Totals | None") -> DeviceUse:
        """Return what the device did since `before`."""

        def since(now: Mapping[str, float], then: Mapping[str, float]) -> dict[str, float]:
            return {name: value - then.get(name, 0.0) for name, value in now.items()}

        elapsed = since(self.elapsed, before.elapsed if before else {})
        return DeviceUse(
            self.pool,
            Role.ROLLOUT in self.roles,
            bool(TRAINED & self.roles),
            max(elapsed.values(), default=0.0),
            since(self.seconds, before.seconds if before else {}),
            since(self.tokens, before.tokens if before else {}),
            self.absent - (before.absent if before else 0.0),
        )

    def copy(self) -> "_Totals":
        return _Totals(
            self.pool,
            self.roles,
            dict(self.elapsed),
            self.absent,
            dict(self.seconds),
            dict(self.tokens),
        )


class DeviceMeter:
    def __init__(
        self,
        workers: Callable[[], Sequence[Metered]],
        timeline: Timeline,
        tokens: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        """`workers`: those that run now. `tokens`: of failed groups and of evaluations so far."""
        self._workers, self._timeline, self._tokens = workers, timeline, tokens
        self._started = self._ended = asyncio.get_running_loop().time()
        self._readings: dict[str, _Reading] = {}
        self._totals: dict[str, _Totals] = {}  # by device
        self._discarded = 0
        self._last: dict[str, _Totals] = {}  # at the last step
        self._last_phases: dict[tuple[str, str], float] = {}
        self._last_tokens = (0.0, 0.0)
        self._due = [0.0, 0.0]  # tokens, wasted and evaluated, that no step has accounted for

    def start(self) -> None:
        """Begin now. What the clocks counted before is the start-up, which does not count."""
        self._started = asyncio.get_running_loop().time()
        for each in self._workers():
            if (report := each.worker.clock) is not None:
                until = each.worker.on_time(report.now)
                self._readings[each.name] = _Reading(until, report)
                # The last report is older than the start, by the negative seconds.
                self._total(each).elapsed[each.name] = until - self._started

    def step(self) -> DeviceTime:
        """Return the ledger since the last step."""
        self._read()
        devices = [total.use(self._last.get(name)) for name, total in self._totals.items()]
        phases = dict(self._timeline.seconds)
        interval = {pair: s - self._last_phases.get(pair, 0.0) for pair, s in phases.items()}
        tokens = self._unused_tokens()
        self._due = [
            due + now - then
            for due, now, then in zip(self._due, tokens, self._last_tokens, strict=True)
        ]
        rate = saturated_rate(total.use(None) for total in self._totals.values())
        found = account(devices, interval, rate, *self._due)
        # Tokens of groups that were generated in earlier steps may exceed the time of this one.
        self._due = [
            max(0.0, due - found.parts[name] * rate)
            for due, name in zip(self._due, ("wasted", "evaluation"), strict=True)
        ]
        self._last = {name: total.copy() for name, total in self._totals.items()}
        self._last_phases, self._last_tokens = phases, tokens
        return found

    def end(self) -> None:
        """Count until now. What a worker has not reported yet, it was idle, unless it has left."""
        self._read()
        self._ended = asyncio.get_running_loop().time()
        for each in self._workers():
            if reading := self._readings.get(each.name):
                idle = max(0.0, self._ended - reading.until)
                self._total(each).elapsed[each.name] += idle
                reading.until += idle

    def summary(self) -> dict[str, Any]:
        """Return the ledger of the run, with the saturated rate of the whole run."""
        devices = [total.use(None) for total in self._totals.values()]
        rate = saturated_rate(devices)
        found = account(devices, self._timeline.seconds, rate, *self._unused_tokens())
        return {
            "devices": len(devices),
            "wall_s": self._ended - self._started,
            "total_s": found.total_s,
            **{f"{name}_s": seconds for name, seconds in found.parts.items()},
            "saturated_tokens_per_s": rate,  # of one device
            "speed_of_light": found.speed_of_light,
        }

    def _unused_tokens(self) -> tuple[float, float]:
        lost, evaluated = self._tokens()
        return float(self._timeline.wasted_tokens + self._discarded + lost), float(evaluated)

    def _read(self) -> None:
        self._timeline.advance()
        for each in self._workers():
            if (report := each.worker.clock) is not None:
                self._count(each, report)

    def _total(self, each: Metered) -> _Totals:
        total = self._totals.setdefault(each.device, _Totals(each.pool, set()))
        total.roles |= set(each.roles)
        return total

    def _count(self, each: Metered, report: ClockReport) -> None:
        reading = self._readings.get(each.name)
        if reading is None:  # it joined the run
            reading = _Reading(each.worker.on_time(report.started))
            self._readings[each.name] = reading
        known = reading.report
        if known is None or known.started != report.started:  # a worker that was replaced
            begun = max(reading.until, each.worker.on_time(report.started))
            absent = begun - reading.until if known else 0.0
            known = ClockReport(report.started, report.started)
            until = max(begun, each.worker.on_time(report.now))
        else:
            absent, until = 0.0, reading.until + report.now - known.now
        total = self._total(each)
        total.absent += absent
        total.elapsed[each.name] = total.elapsed.get(each.name, 0.0) + until - reading.until
        for name, seconds in report.seconds.items():
            more = seconds - known.seconds.get(name, 0.0)
            total.seconds[name] = total.seconds.get(name, 0.0) + more
        for name, count in report.counts.items():
            more = (count - known.counts.get(name, 0)) / each.ranks
            if name == DISCARDED:
                self._discarded += round(more)
            else:
                total.tokens[name] = total.tokens.get(name, 0.0) + more
        reading.until, reading.report = until, report
