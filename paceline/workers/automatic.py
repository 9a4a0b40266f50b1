"""Automatic settings: chosen once, for the devices, the model and the load of a run.

docs/automatic.md has the rules in one table. What the user sets is never changed. The choice
depends on the size of the memory, not on how much of it is free, so it is the same every time.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import MAY_CHANGE, RunConfig
from paceline.model.support import can_recompute
from paceline.placement import TRAINED_ROLES
from paceline.reward.lookup import builtin
from paceline.settings import AUTO, open_settings, with_settings
from paceline.training.memory import parameter_count
from paceline.types import OnSync, Role
from paceline.workers.cluster import Device, Node, PlannedWorker
from paceline.workers.fit import GB, memory_of, process_bytes
from paceline.workers.phase_memory import MemoryNeed, Models, Phase
from paceline.workers.pools import plan_workers

GPU_PART, HOST_PART = 0.9, 0.8  # of a memory that a plan may fill
GPU_TOKENS = (32768, 16384, 8192, 4096, 2048)  # of a micro-batch; more are not faster
CPU_TOKENS = (4096, 2048, 1024, 512)
FRACTIONS = tuple(percent / 100 for percent in range(90, 0, -5))  # of free memory for the KV cache
GPU_SLOTS, VLLM_SLOTS, CPU_SLOTS = 1024, 512, 64  # more do not generate faster
SMALL_MODEL, SMALL_CPU_SLOTS = 20_000_000, 256  # parameters up to which a CPU batches more
UNEVEN = 1.25  # completions of the fullest of several engines, relative to the mean
BFLOAT16 = 8  # compute capability
CORES_PER_REWARD, REWARD_WORKERS = 4, 8


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting that was chosen, and why."""

    name: str
    value: Any
    why: str

    @property
    def text(self) -> str:
        """The value as it is written on the command line."""
        return str(self.value).lower() if isinstance(self.value, bool) else str(self.value)

    def __str__(self) -> str:
        return f"{self.name}={self.text} ({self.why})"


def choose(
    config: RunConfig, models: Models, nodes: Sequence[Node], roles: Sequence[Role] | None = None
) -> tuple[RunConfig, list[Choice]]:
    """Return the configuration with all automatic settings set, and what was chosen.

    `roles`: those that are used; default: all of a training run.
    """
    chooser = _Chooser(config, models, nodes, plan_workers(config, nodes, roles))
    chooser.choose()
    return chooser.config, chooser.choices


def keep_recorded(config: RunConfig, recorded: Mapping[str, Any]) -> RunConfig:
    """Set what an earlier part of the run chose and a resumed run must not change."""
    kept = {}
    for name in set(open_settings(config)) - MAY_CHANGE:
        if (value := _recorded(recorded, name)) != AUTO:
            kept[name] = value
    return with_settings(config, kept)


def changed_choices(choices: Sequence[Choice], recorded: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting that was another before the run was resumed."""
    before = {choice: _recorded(recorded, choice.name) for choice in choices}
    return [
        f"{choice.name} was {was} before the run was resumed, and is {choice.text} on these devices"
        for choice, was in before.items()
        if was not in (AUTO, choice.value)
    ]


def _recorded(settings: Mapping[str, Any], name: str) -> Any:
    section, _, last = name.partition(".")
    return settings.get(section, {}).get(last, AUTO)


class _Memory:
    """The memory that planned workers need, compared with what their devices have."""

    def __init__(
        self, plans: Sequence[PlannedWorker], nodes: Sequence[Node], models: Models
    ) -> None:
        self._plans, self._nodes, self._models = plans, nodes, models
        self._kinds = list({(plan.roles, plan.ranks): plan for plan in plans}.values())
        self._by_name = {node.name: node for node in nodes}
        self._tenants = Counter(self._place(d) for plan in plans for d in plan.devices)

    def fits(self, config: RunConfig) -> bool:
        return all(
            memory_of(plan, self._nodes, config, self._models).peak().at_most
            <= self._room(plan, config)
            for plan in self._kinds
        )

    def activations(self, config: RunConfig) -> int:
        needs = self._needs(config, Phase.TRAIN)
        return max((n.at_most for name, n in needs if name.endswith("activations")), default=0)

    def cache(self, config: RunConfig) -> MemoryNeed:
        """Return the KV cache of an engine: of one sequence, and of as many as have room."""
        needs = self._needs(config, Phase.GENERATE)
        return next((need for name, need in needs if name == "KV cache"), MemoryNeed(0, 0))

    def _needs(self, config: RunConfig, phase: Phase) -> Iterator[tuple[str, MemoryNeed]]:
        for plan in self._kinds:
            found = memory_of(plan, self._nodes, config, self._models).phases()
            yield from found.get(phase, {}).items()

    def _room(self, plan: PlannedWorker, config: RunConfig) -> float:
        """Return the memory of a rank: its part of the device, which ranks may share."""
        return min(
            self._memory(device) / self._tenants[self._place(device)]
            - process_bytes(plan, config, self._by_name[device.node].gpus > 0)
            for device in plan.devices
        )

    def _memory(self, device: Device) -> float:
        node = self._by_name[device.node]
        return (GPU_PART * node.gpu_memory if node.gpus else HOST_PART * node.memory) or math.inf

    def _place(self, device: Device) -> Device:
        """Return the device, or one that stands for the memory that all CPU slots share."""
        return device if self._by_name[device.node].gpus else Device(device.node, -1)


class _Chooser:
    def __init__(
        self,
        config: RunConfig,
        models: Models,
        nodes: Sequence[Node],
        plans: Sequence[PlannedWorker],
    ) -> None:
        self.config, self.choices = config, list[Choice]()
        self._open = set(open_settings(config))
        self._plans, self._models = plans, models
        self._memory = _Memory(plans, nodes, models)
        used = {device.node for plan in plans for device in plan.devices}
        self._nodes = [node for node in nodes if node.name in used]
        self._gpu = any(node.gpus for node in self._nodes)
        self._known = not self._gpu or all(node.gpu_memory for node in self._nodes)
        self._longest = config.data.max_prompt_length + config.rollout.max_response_length

    def choose(self) -> None:
        self._set("train.dtype", *self._dtype())
        if self._can_overlap():
            self._set("placement.overlap", True, "one GPU, faster than turns")
        self._choose_memory(*self._load())
        self._choose_processes()

    def _set(self, name: str, value: Any, why: str) -> None:
        if name in self._open:
            self.config = with_settings(self.config, {name: value})
            self.choices.append(Choice(name, value, why))

    def _can_overlap(self) -> bool:
        """Return whether one GPU generates ahead of training and can do both at a time."""
        config = self.config
        return (
            self._gpu
            and [plan.alone and not plan.ranks for plan in self._plans] == [True]
            and {Role.ACTOR, Role.ROLLOUT} <= set(self._plans[0].roles)
            and config.cluster == "local"
            and config.rollout.engine == "native"
            and config.train.lora is None
            and config.schedule.max_staleness > 0
            and config.schedule.on_sync is not OnSync.DRAIN
        )

    def _dtype(self) -> tuple[str, str]:
        if not self._gpu:
            return "float32", "no GPU"
        oldest = min((node.capability for node in self._nodes if node.capability), default=BFLOAT16)
        if oldest < BFLOAT16:
            return "float32", f"a GPU of compute capability {oldest} has no bfloat16"
        return "bfloat16", "GPU"

    def _load(self) -> tuple[int, str]:
        """Return how many completions an engine should generate at a time, and why."""
        config, group = self.config, self.config.group_size
        group += config.algorithm.needs_greedy_baseline
        # On a GPU, all completions that the bound allows decode together: large batches cost less.
        steps = 1 + config.schedule.max_staleness if self._gpu else 1
        slots = config.groups_per_step * group * steps
        why = f"{config.groups_per_step} x {group} completions per step"
        why += f", {steps} steps" if steps > 1 else ""
        size = config.rollout.ranks
        engines = sum(
            max(1, plan.processes // size) if set(TRAINED_ROLES) & set(plan.roles) else 1
            for plan in self._plans
            if Role.ROLLOUT in plan.roles
        )
        if engines > 1:
            slots = math.ceil(UNEVEN * slots / engines / 8) * 8
            why += f", {engines} engines"
        most, device = self._most_slots()
        return (most, f"more are not faster on {device}") if slots > most else (slots, why)

    def _most_slots(self) -> tuple[int, str]:
        if self._gpu:
            vllm = self.config.rollout.engine == "vllm"
            return VLLM_SLOTS if vllm else GPU_SLOTS, "a GPU"
        small = parameter_count(self._models.policy) <= SMALL_MODEL
        return SMALL_CPU_SLOTS if small else CPU_SLOTS, "a CPU"

    # -- memory

    def _choose_memory(self, slots: int, why: str) -> None:
        """Choose the fastest training that fits and leaves enough memory for the KV cache."""
        if "rollout.slots" in self._open:
            self.config = with_settings(self.config, {"rollout.slots": slots})
        *faster, last = self._micro_batches()
        least = self._fit(*last) or self._shrunk(*last)
        cache = self._memory.cache(least)
        mean = cache.fixed * (1 - self.config.rollout.max_response_length / self._longest / 2)
        wanted = min(cache.at_most / 2, self.config.slots * mean)
        fitting = (found for size in faster if (found := self._fit(*size)))
        chosen = next((c for c in fitting if self._memory.cache(c).at_most >= wanted), least)
        self._choose_training(chosen)
        if not (cache := self._memory.cache(chosen)).at_most:
            return  # it does not generate
        fits, room = self.config.rollout.slots, f"{_size(cache.at_most)} for the KV cache"
        if self._gpu and self._known:
            room_for = int(cache.at_most / mean)
            fits = min(fits, max(1, room_for // 8 * 8 or room_for))
        self._set("rollout.slots", fits, why if fits == slots else room)
        if self._gpu and self._known:
            self._set("rollout.kv_memory_fraction", chosen.rollout.kv_memory_fraction, room)

    def _choose_training(self, chosen: RunConfig) -> None:
        activations, train = self._memory.activations(chosen), chosen.train
        if not activations:
            return  # it does not train
        why = f"activations of at most {_size(activations)}"
        self._set("train.micro_batch_tokens", train.micro_batch_tokens, why)
        recomputes = train.gradient_checkpointing
        why = "activations do not fit without it" if recomputes else "activations fit"
        self._set("train.gradient_checkpointing", recomputes, why)

    def _micro_batches(self) -> Iterator[tuple[int, bool]]:
        """Yield sizes of micro-batches with and without recomputation, the fastest first."""
        train = self.config.train
        sizes = [train.micro_batch_tokens]
        if "train.micro_batch_tokens" in self._open and self._known:
            useful = GPU_TOKENS if self._gpu else CPU_TOKENS
            step = self.config.groups_per_step * self.config.group_size * self._longest
            sizes = [size for size in useful if self._longest < size < 2 * step]
            least = max(useful[-1], self._longest)
            sizes += [least] if not sizes or sizes[-1] > least else []
        free = "train.gradient_checkpointing" in self._open
        both = free and can_recompute(self._models.policy)
        for recomputes in (False, True) if both else (train.gradient_checkpointing,):
            yield from ((size, recomputes) for size in sizes)

    def _fit(self, tokens: int, recomputes: bool) -> RunConfig | None:
        """Return the settings with the largest KV cache that fits beside such micro-batches."""
        configs = (self._with(tokens, recomputes, part) for part in self._fractions())
        return next((config for config in configs if self._memory.fits(config)), None)

    def _shrunk(self, tokens: int, recomputes: bool) -> RunConfig:
        """Return the settings with the most slots that fit; with the fewest if nothing fits."""
        while "rollout.slots" in self._open and self.config.rollout.slots > 8 and not self._gpu:
            slots = self.config.rollout.slots // 2
            self.config = with_settings(self.config, {"rollout.slots": slots})
            if found := self._fit(tokens, recomputes):
                return found
        return self._with(tokens, recomputes, self._fractions()[-1])

    def _fractions(self) -> Sequence[float]:
        free = self._gpu and self._known and "rollout.kv_memory_fraction" in self._open
        return FRACTIONS if free else (self.config.rollout.kv_memory_fraction,)

    def _with(self, tokens: int, recomputes: bool, fraction: float) -> RunConfig:
        return with_settings(
            self.config,
            {
                "train.micro_batch_tokens": tokens,
                "train.gradient_checkpointing": recomputes,
                "rollout.kv_memory_fraction": fraction,
            },
        )

    # -- cores

    def _choose_processes(self) -> None:
        cores = min((node.cpus for node in self._nodes), default=0)
        if not cores:  # of a cluster that is not there
            return
        processes = Counter(device.node for plan in self._plans for device in plan.devices)
        most = max(processes.values())
        why = f"{cores} core{'s' if cores > 1 else ''}"
        shared = f"{why}, {most} process{'es' if most > 1 else ''}"
        self._set("placement.threads", self._plans[0].threads, shared)
        if any(not builtin(name) for name in self.config.reward.names):
            workers = max(1, min(REWARD_WORKERS, cores // CORES_PER_REWARD))
            self._set("reward.workers", workers, why)


def _size(number: float) -> str:
    return f"{number / GB:.1f} GB" if number >= GB / 10 else f"{number / 2**20:.0f} MB"
