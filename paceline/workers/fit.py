"""Memory that all planned workers need, compared with their devices before anything starts.

Parameters, gradients and optimizer state are exact; a plan that lacks memory for them is rejected.
Activations and the KV cache are upper bounds; a plan that may lack memory for them gets a warning.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.types import Role
from paceline.workers.cluster import Device, Node, PlannedWorker
from paceline.workers.phase_memory import MemoryNeed, Models, Needs, Phase, WorkerMemory

PROCESS = 380 << 20  # host memory of an interpreter with torch and transformers
CONTEXT = 1 << 30  # GPU memory of a process: CUDA context, libraries
COMMUNICATION = 400 << 20  # GPU memory of a rank of a group, or of vLLM, in addition
GB = 1 << 30


class DoesNotFit(ConfigError):
    """A layout that lacks memory."""


def process_bytes(plan: PlannedWorker, config: RunConfig, on_gpu: bool) -> int:
    """Return what a process of a planned worker holds before it has a model."""
    if not on_gpu:
        return PROCESS
    vllm = Role.ROLLOUT in plan.roles and config.rollout.engine == "vllm"
    return CONTEXT + (COMMUNICATION if plan.ranks or vllm else 0)


def memory_of(
    plan: PlannedWorker,
    nodes: Sequence[Node],
    config: RunConfig,
    models: Models,
    full_cache: bool = False,
) -> WorkerMemory:
    """Return the memory of a planned worker on its smallest device.

    An engine limits its KV cache to what a GPU has, unless it is to be a `full_cache`.
    """
    own = [node for node in nodes if node.name in {device.node for device in plan.devices}]
    smallest = 0 if full_cache else min((node.gpu_memory for node in own), default=0)
    gpu = any(node.gpus for node in own)
    return WorkerMemory(plan, config, models, gpu=gpu, device_bytes=max(0, smallest - CONTEXT))


def phases_of(
    plan: PlannedWorker, nodes: Sequence[Node], config: RunConfig, models: Models
) -> dict[Phase, Needs]:
    """Return what a rank of a planned worker needs in each phase, with its process."""
    process = process_bytes(plan, config, any(node.gpus for node in nodes))
    return {
        phase: {**needs, "process": MemoryNeed(process, process)}
        for phase, needs in memory_of(plan, nodes, config, models).phases().items()
    }


def check_fit(
    plans: Sequence[PlannedWorker],
    nodes: Sequence[Node],
    config: RunConfig,
    models: Models,
    full_cache: bool = False,
) -> list[str]:
    """Raise DoesNotFit if workers cannot fit; return warnings if they may not.

    Devices of unknown memory are not checked.
    """
    by_name = {node.name: node for node in nodes}
    used: dict[Device, Counter[str]] = defaultdict(Counter)  # required bytes by worker
    at_most: Counter[Device] = Counter()
    pools: dict[Device, set[str]] = defaultdict(set)
    needs: dict[tuple[object, ...], MemoryNeed] = {}
    for plan in plans:
        kind = plan.roles, plan.ranks, *{device.node for device in plan.devices}
        need = needs.get(kind) or memory_of(plan, nodes, config, models, full_cache).peak()
        needs[kind] = need
        for device in plan.devices:
            on_gpu = by_name[device.node].gpus > 0
            # CPU slots share the node's memory.
            place = device if on_gpu else Device(device.node, -1)
            process = process_bytes(plan, config, on_gpu)
            used[place][plan.name] += need.fixed + process
            at_most[place] += need.at_most + process
            pools[place].add(plan.pool)
    warnings: dict[frozenset[str], str] = {}  # devices of one pool have the same
    for place, tenants in used.items():
        node = by_name[place.node]
        has, what = (
            (node.gpu_memory, f"GPU {place}") if node.gpus else (node.memory, f"node {place.node}")
        )
        who = ", ".join(f"{name} {size / GB:.1f} GB" for name, size in tenants.items())
        if 0 < has < tenants.total():
            raise DoesNotFit(
                f"{what} has {has / GB:.1f} GB, but its workers need at least "
                f"{tenants.total() / GB:.1f} GB ({who})"
            )
        if 0 < has < at_most[place] and frozenset(pools[place]) not in warnings:
            warnings[frozenset(pools[place])] = (
                f"{what} has {has / GB:.1f} GB; with full micro-batches and KV caches "
                f"{', '.join(tenants)} would need {at_most[place] / GB:.1f} GB: if memory runs "
                "out, lower train.micro_batch_tokens or rollout.slots, or set "
                "train.gradient_checkpointing = true"
            )
    return list(warnings.values())
