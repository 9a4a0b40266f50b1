"""What each planned worker needs of its devices, and whether they have it: before anything is started.

Parameters, gradients and optimizer are exact, and what is refused is refused for them. Activations and the engine's cache are upper
bounds: shown, and warned of, since smaller ones also work.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.model.loading import load_config
from paceline.model.shape import model_shape
from paceline.train.memory import memory_estimate
from paceline.types import Role
from paceline.workers.cluster import Device, Node, PlannedWorker
from paceline.workers.pools import find_nodes, plan_workers

PROCESS = 300 << 20  # of host memory: an interpreter with torch in it
GB = 1 << 30
TIPS_GPU = (
    "use more placement.train_ranks with train.backend = 'fsdp', give roles pools of their own, train adapters ([train.lora]), "
    "or take a smaller model"
)
TIPS_NODE = "lower placement.rollout_workers, train adapters ([train.lora]), add machines (cluster = 'ray'), or take a smaller model"


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on each device of a worker."""

    fixed: int  # without these nothing works
    at_most: int  # with all activations and the whole cache

    def __add__(self, other: "MemoryNeed") -> "MemoryNeed":
        return MemoryNeed(self.fixed + other.fixed, self.at_most + other.at_most)


def needs(plan: PlannedWorker, config: RunConfig, model_path: str) -> dict[Role, MemoryNeed]:
    """By role, on the rank that holds the most."""
    model = load_config(model_path)
    trains = {Role.ACTOR, Role.CRITIC, Role.REF} & set(plan.roles)
    parts = (
        memory_estimate(model, config.train, plan.processes) if trains else {}
    )  # engines alone are not split as trainers are
    found: dict[Role, MemoryNeed] = {}
    for role in plan.roles:
        if role in (Role.ACTOR, Role.CRITIC):
            kept = (
                parts["parameters"]
                if role is Role.ACTOR and config.train.lora
                else sum(parts.values()) - parts["activations"]
            )
            found[role] = MemoryNeed(kept, kept + parts["activations"])
        elif role is Role.REF:
            kept = 0 if config.train.lora and Role.ACTOR in plan.roles else parts["parameters"]
            found[role] = MemoryNeed(kept, kept + parts["activations"])
        elif role is Role.REWARD:
            assert config.reward.model
            size = _parameters(
                load_config(config.reward.model), AutoModelForSequenceClassification
            ) * _itemsize(config)
            found[role] = MemoryNeed(size, size)
        else:
            found[role] = _rollout(config, model, shared=config.in_place and not config.train.lora)
    return found


async def plan_that_fits(
    config: RunConfig, model_path: str
) -> tuple[list[Node], list[PlannedWorker], list[str]]:
    """What there is, who would run where, and warnings about what may not fit. Raises ConfigError for what cannot. Starts nothing."""
    nodes = await find_nodes(config)
    plans = plan_workers(config, nodes)
    return nodes, plans, check_fit(plans, nodes, config, model_path)


def check_fit(
    plans: Sequence[PlannedWorker], nodes: Sequence[Node], config: RunConfig, model_path: str
) -> list[str]:
    """Raises ConfigError for what cannot fit; returns warnings about what may not. Memory that is not known is not judged."""
    by_name = {node.name: node for node in nodes}
    used: dict[Device, Counter[str]] = defaultdict(Counter)  # by worker: what nothing works without
    at_most: Counter[Device] = Counter()
    for plan in plans:
        need = sum(needs(plan, config, model_path).values(), MemoryNeed(0, 0))
        for device in plan.devices:
            on_gpu = by_name[device.node].gpus > 0
            place = (
                device if on_gpu else Device(device.node, -1)
            )  # CPU slots share the node's memory
            used[place][plan.name] += need.fixed + (0 if on_gpu else PROCESS)
            at_most[place] += need.at_most + (0 if on_gpu else PROCESS)
    warnings = []
    for place, tenants in used.items():
        node = by_name[place.node]
        has, what = (
            (node.gpu_memory, f"GPU {place}") if node.gpus else (node.memory, f"node {place.node}")
        )
        who = ", ".join(f"{name} {size / GB:.1f} GB" for name, size in tenants.items())
        if 0 < has < tenants.total():
            raise ConfigError(
                f"{what} has {has / GB:.1f} GB, and what is planned for it needs at least {tenants.total() / GB:.1f} GB ({who}): "
                f"{TIPS_GPU if node.gpus else TIPS_NODE}"
            )
        if 0 < has < at_most[place]:
            warnings.append(
                f"{what} has {has / GB:.1f} GB; with full micro-batches and caches {', '.join(tenants)} would take "
                f"{at_most[place] / GB:.1f} GB: lower train.micro_batch_tokens or rollout.slots, or set "
                f"train.gradient_checkpointing = true, if memory runs out"
            )
    return warnings


def _rollout(config: RunConfig, model: PretrainedConfig, shared: bool) -> MemoryNeed:
    """Weights, unless they are the trainer's own, and keys and values: of one sequence at least, of all slots at most."""
    weights = 0 if shared else _parameters(model) * _itemsize(config)
    shape = model_shape(model)
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * _itemsize(config)
    sequence = token * (config.data.max_prompt_length + config.rollout.max_response_length)
    return MemoryNeed(weights + sequence, weights + sequence * config.slots)


def _parameters(model: PretrainedConfig, kind: Any = AutoModelForCausalLM) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in kind.from_config(model).parameters())


def _itemsize(config: RunConfig) -> int:
    return int(getattr(torch, config.train.dtype).itemsize)
