"""Every mode of a recipe side by side, simulated with the same load on as many devices."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.schedule import ScheduleSettings
from paceline.simulator.costs import CostModel
from paceline.simulator.lengths import Distribution, read_distribution
from paceline.simulator.simulation import Outcome, Scenario, simulate
from paceline.types import OnSync, Role

MOST_SLOTS = 1024  # of an engine whose rollout.slots is automatic
UNEVEN = 1.25  # completions of the fullest of several engines, relative to the mean
PILOT_STEPS = 4  # measured steps of the short runs that find the split of devices
DEFAULT_STALENESS = 2  # of the asynchronous modes, if the recipe is synchronous
CLEARLY = 1.02  # a mode that is less than 2 % faster than hybrid sync is not called faster
HYBRID = "hybrid sync"


@dataclass(frozen=True, slots=True)
class ModeResult:
    mode: str
    devices: str  # rollout+train, train+critic, or all of a shared pool
    shared: bool  # generation and training have the same devices
    settings: tuple[str, ...]  # that select the mode
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Comparison:
    lengths: str
    prompt_tokens: int
    devices: int
    results: tuple[ModeResult, ...]

    @property
    def fastest(self) -> ModeResult:
        """The fastest mode; hybrid sync, which is never stale, unless another is clearly faster."""
        best = max(self.results, key=lambda result: result.outcome.steps_per_s)
        return best if self.ratio(best) > CLEARLY else self.results[0]

    def ratio(self, result: ModeResult) -> float:
        return result.outcome.steps_per_s / self.results[0].outcome.steps_per_s

    def verdict(self) -> str:
        """Say which mode is the fastest, and by how much."""
        best = self.fastest
        if best.mode != HYBRID:
            return f"fastest: {best.mode}, {self.ratio(best):.2f}x {HYBRID}. " + (
                f"Settings: {' '.join(best.settings)}"
            )
        others = self.results[1:]
        if not others:
            return f"{HYBRID} is the only mode for these devices"
        second = max(others, key=lambda result: result.outcome.steps_per_s)
        return (
            f"fastest: {HYBRID}. The best other mode, {second.mode}, reaches "
            f"{self.ratio(second):.2f}x; stay synchronous"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "lengths": self.lengths,
            "prompt_tokens": self.prompt_tokens,
            "devices": self.devices,
            "fastest": self.fastest.mode,
            "modes": [result.to_json() | {"ratio": self.ratio(result)} for result in self.results],
        }


def recipe_devices(config: RunConfig) -> int:
    """Return the devices that a recipe asks for: one per pool where it gives no number."""
    placement = config.placement
    train = placement.train_ranks or 1
    critic = placement.shared(Role.ACTOR, Role.CRITIC) or not config.algorithm.needs_critic
    separate = not placement.shared(Role.ACTOR, Role.ROLLOUT)
    engines = (placement.rollout_workers or 1) * config.rollout.ranks if separate else 0
    return train + (0 if critic else train) + engines


def compare_modes(
    config: RunConfig,
    costs: CostModel,
    lengths: Distribution | None = None,
    devices: int | None = None,
    steps: int | None = None,
    prompt_tokens: int | None = None,
    report: Callable[[str], None] = lambda mode: None,
) -> Comparison:
    """Simulate the recipe in every mode that the devices allow.

    `prompt_tokens`: mean length of prompts; default: half of data.max_prompt_length. `report` gets
    the name of each mode.
    """
    devices = devices or recipe_devices(config)
    size = config.rollout.ranks
    if devices < size:
        raise ConfigError(
            f"--devices {devices}: an engine needs {size} devices (rollout.tensor_parallel x "
            f"rollout.pipeline_parallel); set at least {size}"
        )
    limit = config.rollout.max_response_length
    lengths = lengths or read_distribution(f"lognormal:{max(1, limit // 4)},0.8")
    base = Scenario(
        costs,
        lengths.tokens(limit),
        ScheduleSettings(),
        prompt_tokens=prompt_tokens or max(1, config.data.max_prompt_length // 2),
        steps=steps or config.steps,
        groups_per_step=config.groups_per_step,
        group_size=config.group_size + config.algorithm.needs_greedy_baseline,
        engine_devices=size,
        has_critic=config.algorithm.needs_critic,
        max_queue_size=config.queue.max_queue_size,
        seed=config.seed,
    )
    results = []
    for mode, scenarios in _modes(config, base, devices):
        report(mode)
        best = _best(scenarios)
        results.append(
            ModeResult(mode, _shares(best), best.shared, _settings(config, best), simulate(best))
        )
    return Comparison(lengths.name, base.prompt_tokens, devices, tuple(results))


def _modes(config: RunConfig, base: Scenario, devices: int) -> Iterator[tuple[str, list[Scenario]]]:
    """Yield each mode that the devices allow, with a scenario per way to divide them."""
    size, on_sync = base.engine_devices, config.schedule.on_sync
    ahead = ScheduleSettings(
        max_staleness=config.schedule.max_staleness or DEFAULT_STALENESS,
        on_sync=OnSync.SWAP if on_sync is OnSync.DRAIN else on_sync,
    )
    one_pool = replace(
        base,
        shared=True,
        engines=devices // size,
        train_devices=devices,
        copies_weights=devices > 1,
    )
    parts = _parts_to_try(devices, size) if devices > size else []

    def two_pools(schedule: ScheduleSettings) -> list[Scenario]:
        pools = [replace(base, engines=n // size, train_devices=devices - n) for n in parts]
        return [_with_slots(config, replace(pool, schedule=schedule)) for pool in pools]

    yield HYBRID, [_with_slots(config, one_pool)]
    if base.has_critic and parts:
        split = [
            replace(one_pool, engines=n // size, train_devices=n, critic_devices=devices - n)
            for n in parts
        ]
        yield "split placement", [_with_slots(config, scenario) for scenario in split]
    if parts:
        yield "one step off", two_pools(ScheduleSettings(max_staleness=1))
        yield "fully async", two_pools(ahead)
    in_turns = _with_slots(config, replace(one_pool, schedule=ahead))
    yield "async in turns", [in_turns]
    if devices == 1:
        yield "async overlap", [replace(in_turns, overlap=True, copies_weights=True)]


def _settings(config: RunConfig, scenario: Scenario) -> tuple[str, ...]:
    """Return the settings that change the recipe to this mode."""
    schedule, shared = scenario.schedule, config.placement.shared(Role.ACTOR, Role.ROLLOUT)
    found = [f"schedule.max_staleness={schedule.max_staleness}"]
    if schedule.max_staleness:
        found.append(f"schedule.on_sync={schedule.on_sync}")
    if scenario.shared and not shared:
        found += ["placement.actor=main", "placement.rollout=main"]
    if not scenario.shared:
        found += ["placement.actor=train", "placement.rollout=rollout"] if shared else []
        found += [f"placement.rollout_workers={scenario.engines}"] if scenario.engines > 1 else []
    if scenario.critic_devices:
        found.append("placement.critic=critic")
    if scenario.train_devices > 1:
        found.append(f"placement.train_ranks={scenario.train_devices}")
    if scenario.overlap or config.placement.overlap:
        found.append(f"placement.overlap={str(scenario.overlap).lower()}")
    return tuple(found)


def _with_slots(config: RunConfig, scenario: Scenario) -> Scenario:
    """Set the slots as a run on GPUs chooses them, unless the recipe sets them."""
    in_flight = scenario.schedule.capacity(scenario.groups_per_step) * scenario.group_size
    uneven = UNEVEN if scenario.engines > 1 else 1.0
    slots = min(MOST_SLOTS, math.ceil(uneven * in_flight / scenario.engines / 8) * 8)
    if "slots" in config.rollout.model_fields_set:
        slots = config.rollout.slots
    return replace(scenario, slots=slots)


def _parts_to_try(devices: int, size: int) -> list[int]:
    """Return numbers of devices for one of two pools, in whole engines: some eighths of all."""
    tried = {devices * eighths // 8 // size * size for eighths in range(1, 8)}
    return sorted({min(max(size, n), (devices - 1) // size * size) for n in tried})


def _best(scenarios: list[Scenario]) -> Scenario:
    """Return the fastest scenario of a short run."""
    if len(scenarios) == 1:
        return scenarios[0]
    pilots = [
        replace(s, steps=min(s.steps, s.schedule.max_staleness + 1 + PILOT_STEPS))
        for s in scenarios
    ]
    speeds = [simulate(pilot).steps_per_s for pilot in pilots]
    return scenarios[speeds.index(max(speeds))]


def _shares(scenario: Scenario) -> str:
    if scenario.critic_devices:
        return f"{scenario.train_devices}+{scenario.critic_devices}"
    if scenario.shared:
        return str(scenario.train_devices)
    return f"{scenario.engines * scenario.engine_devices}+{scenario.train_devices}"
