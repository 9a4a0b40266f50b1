"""Memory that each planned worker needs, compared with its devices before anything starts.

Parameters, gradients and optimizer state are exact; a plan that lacks memory for them is rejected.
Activations and the KV cache are upper bounds; a plan that may lack memory for them gets a warning.
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
from paceline.training.backends import check_backend
from paceline.training.memory import memory_estimate
from paceline.types import Role
from paceline.workers.cluster import Device, Node, PlannedWorker
from paceline.workers.pools import find_nodes, plan_workers

PROCESS = 300 << 20  # host memory of an interpreter with torch
GB = 1 << 30
TIPS_GPU = (
    "use more placement.train_ranks with train.backend = 'fsdp', give roles separate pools, train "
    "adapters ([train.lora]), or use a smaller model"
)
TIPS_NODE = (
    "lower placement.rollout_workers, train adapters ([train.lora]), add machines "
    "(cluster = 'ray'), or use a smaller model"
)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    fixed: int  # required
    at_most: int  # with all activations and a full KV cache

    def __add__(self, other: "MemoryNeed") -> "MemoryNeed":
        return MemoryNeed(self.fixed + other.fixed, self.at_most + other.at_most)


def needs(plan: PlannedWorker, config: RunConfig, model_path: str) -> dict[Role, MemoryNeed]:
    """Return the need of each role on the rank that holds the most."""
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
    """Return nodes, planned workers and warnings. Raise ConfigError if they cannot fit."""
    nodes = await find_nodes(config)
    _check_gpus(config, sum(node.gpus for node in nodes))
    plans = plan_workers(config, nodes)
    return nodes, plans, check_fit(plans, nodes, config, model_path)


def _check_gpus(config: RunConfig, gpus: int) -> None:
    """Raise ConfigError if the run needs more GPUs than there are, or a package for them."""
    wanted = config.placement.min_gpus
    if gpus < wanted:
        where = "this machine" if config.cluster == "local" else "the cluster"
        raise ConfigError(
            f"placement.min_gpus = {wanted}, but {where} has {gpus} GPUs. To run with what there "
            "is, remove placement.min_gpus; in settings of verl, remove trainer.n_gpus_per_node "
            "and rollout.n_gpus_per_node, or set both to 0"
        )
    if config.cluster == "local":  # the machines of a cluster may have other packages
        check_backend(config.train, gpus)


def check_fit(
    plans: Sequence[PlannedWorker], nodes: Sequence[Node], config: RunConfig, model_path: str
) -> list[str]:
    """Raise ConfigError if workers cannot fit; return warnings if they may not.

    Devices of unknown memory are not checked.
    """
    by_name = {node.name: node for node in nodes}
    used: dict[Device, Counter[str]] = defaultdict(Counter)  # required bytes by worker
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
                f"{what} has {has / GB:.1f} GB, but its workers need at least "
                f"{tenants.total() / GB:.1f} GB ({who}): {TIPS_GPU if node.gpus else TIPS_NODE}"
            )
        if 0 < has < at_most[place]:
            warnings.append(
                f"{what} has {has / GB:.1f} GB; with full micro-batches and KV caches "
                f"{', '.join(tenants)} would need {at_most[place] / GB:.1f} GB: if memory runs "
                "out, lower train.micro_batch_tokens or rollout.slots, or set "
                "train.gradient_checkpointing = true"
            )
    return warnings


def _rollout(config: RunConfig, model: PretrainedConfig, shared: bool) -> MemoryNeed:
    """Return the need of an engine: weights, unless shared, and a KV cache of 1 to all slots."""
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
