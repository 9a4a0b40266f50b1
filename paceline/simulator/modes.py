"""Every mode of a recipe side by side, simulated with the same load on as many devices."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.schedule import ScheduleSettings
from paceline.simulator.costs import CostModel
from paceline.simulator.lengths import Distribution, read_distribution
from paceline.simulator.limit import limit_steps_per_s
from paceline.simulator.simulation import Outcome, Scenario, simulate
from paceline.types import OnSync, Role

MOST_SLOTS = 1024  # of an engine whose rollout.slots is automatic
UNEVEN = 1.25  # completions of the fullest of several engines, relative to the mean
PILOT_STEPS = 4  # measured steps of the short runs that find the split of devices
DEFAULT_STALENESS = 2  # of the asynchronous modes, if the recipe is synchronous
FASTER = 1.03  # a staleness bound that is less than 3 % faster than a lower one is not worth it
CLEARLY = 1.02  # a mode that is less than 2 % faster than hybrid sync is not called faster
HYBRID = "hybrid sync"


@dataclass(frozen=True, slots=True)
class ModeResult:
    mode: str
    settings: tuple[str, ...]  # that select the mode
    scenario: Scenario
    outcome: Outcome

    @property
    def shared(self) -> bool:
        """Whether generation and training have the same devices."""
        return self.scenario.shared

    @property
    def devices(self) -> str:
        """Devices of rollout+train, of train+critic, or all of a shared pool."""
        scenario = self.scenario
        if scenario.critic_devices:
            return f"{scenario.train_devices}+{scenario.critic_devices}"
        if scenario.shared:
            return str(scenario.train_devices)
        return f"{scenario.engines * scenario.engine_devices}+{scenario.train_devices}"

    @property
    def limit_steps_per_s(self) -> float:
        return limit_steps_per_s(self.scenario)

    def with_slots(self, slots: int) -> "ModeResult":
        """Return the result of engines with another number of slots."""
        if slots == self.scenario.slots:
            return self
        scenario = replace(self.scenario, slots=slots)
        return replace(self, scenario=scenario, outcome=simulate(scenario))

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "devices": self.devices,
            "shared": self.shared,
            "settings": self.settings,
            "slots": self.scenario.slots,
            "limit_steps_per_s": self.limit_steps_per_s,
            "outcome": asdict(self.outcome),
        }


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

    @property
    def preferred(self) -> list[ModeResult]:
        """All modes, the fastest first; hybrid sync before those that are not clearly faster."""
        slower = sorted(
            (result for result in self.results if result is not self.fastest),
            key=lambda result: -result.outcome.steps_per_s,
        )
        return [self.fastest, *slower]

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
    staleness: Sequence[int] = (DEFAULT_STALENESS,),
) -> Comparison:
    """Simulate the recipe in every mode that the devices allow.

    `prompt_tokens`: mean length of prompts; default: half of data.max_prompt_length. `report` gets
    the name of each mode. `staleness`: bounds of the asynchronous modes to choose from, if the
    recipe sets none; the lowest of those that are about as fast is taken.
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
        group_size=config.group_size,
        greedy_baseline=config.algorithm.needs_greedy_baseline,
        engine_devices=size,
        has_critic=config.algorithm.needs_critic,
        max_queue_size=config.queue.max_queue_size,
        seed=config.seed,
    )
    results = []
    bounds = (config.schedule.max_staleness,) if config.schedule.max_staleness else staleness
    for mode, scenarios in _modes(config, base, devices, bounds):
        report(mode)
        best = _best(scenarios)
        results.append(ModeResult(mode, _settings(config, best), best, simulate(best)))
    return Comparison(lengths.name, base.prompt_tokens, devices, tuple(results))


def _modes(
    config: RunConfig, base: Scenario, devices: int, bounds: Sequence[int]
) -> Iterator[tuple[str, list[Scenario]]]:
    """Yield each mode that the devices allow, with a scenario per way to divide them.

    `bounds`: of the staleness of the asynchronous modes.
    """
    size, on_sync = base.engine_devices, config.schedule.on_sync
    on_sync = OnSync.SWAP if on_sync is OnSync.DRAIN else on_sync
    ahead = [ScheduleSettings(max_staleness=bound, on_sync=on_sync) for bound in bounds]
    one_pool = replace(
        base,
        shared=True,
        engines=devices // size,
        train_devices=devices,
        copies_weights=devices > 1,
    )
    parts = _parts_to_try(devices, size) if devices > size else []

    def two_pools(schedules: Sequence[ScheduleSettings]) -> list[Scenario]:
        pools = [replace(base, engines=n // size, train_devices=devices - n) for n in parts]
        return [
            _with_slots(config, replace(pool, schedule=schedule))
            for schedule in schedules
            for pool in pools
        ]

    yield HYBRID, [_with_slots(config, one_pool)]
    if base.has_critic and parts:
        split = [
            replace(one_pool, engines=n // size, train_devices=n, critic_devices=devices - n)
            for n in parts
        ]
        yield "split placement", [_with_slots(config, scenario) for scenario in split]
    if parts:
        yield "one step off", two_pools([ScheduleSettings(max_staleness=1)])
        yield "fully async", two_pools(ahead)
    in_turns = [_with_slots(config, replace(one_pool, schedule=schedule)) for schedule in ahead]
    yield "async in turns", in_turns
    if devices == 1:
        both = [replace(scenario, overlap=True, copies_weights=True) for scenario in in_turns]
        yield "async overlap", both


def _settings(config: RunConfig, scenario: Scenario) -> tuple[str, ...]:
    """Return the settings that change the recipe to this mode."""
    schedule, shared = scenario.schedule, config.placement.shared(Role.ACTOR, Role.ROLLOUT)
    workers, actor = config.placement.rollout_workers, config.placement.actor
    found = [f"schedule.max_staleness={schedule.max_staleness}"]
    if schedule.max_staleness:
        found.append(f"schedule.on_sync={schedule.on_sync}")
    if config.schedule.sync_every > 1:
        found.append("schedule.sync_every=1")
    if scenario.shared and not shared:
        found += ["placement.actor=main", "placement.rollout=main"]
        actor = "main"
    if scenario.shared and (workers or 1) > 1:
        found.append("placement.rollout_workers=1")
    if not scenario.shared:
        found += ["placement.actor=train", "placement.rollout=rollout"] if shared else []
        actor = "train" if shared else actor
        if scenario.engines > 1 or workers is not None:
            found.append(f"placement.rollout_workers={scenario.engines}")
    if scenario.critic_devices:
        found.append("placement.critic=critic")
    elif config.placement.critic is not None:
        found.append(f"placement.critic={actor}")
    if scenario.train_devices > 1 or config.train.backend != "single":
        found += ["train.backend=fsdp"] if config.train.backend == "single" else []
        found.append(f"placement.train_ranks={scenario.train_devices}")
    ahead = scenario.shared and schedule.max_staleness and scenario.train_devices == 1
    if scenario.overlap or config.placement.overlap or ahead:  # else it is chosen automatically
        found.append(f"placement.overlap={str(scenario.overlap).lower()}")
    return tuple(found)


def _with_slots(config: RunConfig, scenario: Scenario) -> Scenario:
    """Set the slots as a run on GPUs chooses them, unless the recipe sets them."""
    in_flight = scenario.schedule.capacity(scenario.groups_per_step) * scenario.generated
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
    """Return the fastest scenario of a short run, with the lowest staleness that is as fast."""
    if len(scenarios) == 1:
        return scenarios[0]
    best, fastest = scenarios[0], 0.0
    for scenario in sorted(scenarios, key=lambda each: each.schedule.max_staleness):
        steps = scenario.schedule.max_staleness + 1 + PILOT_STEPS
        speed = simulate(replace(scenario, steps=min(scenario.steps, steps))).steps_per_s
        same = scenario.schedule.max_staleness == best.schedule.max_staleness
        if speed > fastest * (1.0 if same else FASTER):
            best, fastest = scenario, speed
    return best
