"""The devices of a Ray cluster that this process has joined, and the actors that it starts on them.

They need no settings of a run, so a restarted run can have some before it has read its model.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from paceline.errors import ConfigError, PacelineError, WorkerDied
from paceline.workers.cluster import PlannedWorker
from paceline.workers.ray.connection import join
from paceline.workers.ray.host import RayHost
from paceline.workers.ray.nodes import (
    cpu_slots,
    free_devices,
    living_nodes,
    node_addresses,
    preferred,
)

log = logging.getLogger(__name__)

RESERVE_TIMEOUT_S = 60.0


class RayDevices:
    def __init__(self, address: str) -> None:
        """Join the cluster at this address."""
        self._groups: dict[str, PlacementGroup] = {}  # by pool
        self._bundles: dict[str, tuple[PlacementGroup, list[int]]] = {}  # by worker
        self._started: Counter[str] = Counter()  # by node
        self._early: dict[tuple[str, int], Any] = {}  # actors by worker and rank
        self._early_plans: list[PlannedWorker] = []
        self._without_device: dict[str, str] = {}  # node of each environment worker
        join(address)
        try:
            self.nodes = living_nodes()
            self.addresses = node_addresses()
        except BaseException:
            ray.shutdown()
            raise
        self._gpus = any(node.gpus for node in self.nodes)

    def start_early(self, plans: Sequence[PlannedWorker]) -> None:
        """Start the processes of workers, which import their libraries but load no model."""
        self._reserve(plans)
        self._early_plans = list(plans)
        for plan in plans:
            for rank in range(plan.processes):
                actor = self._early[plan.name, rank] = self._start(plan, rank)[1]
                actor.load.remote("paceline.workers.build")

    async def reserve(self, plans: Sequence[PlannedWorker]) -> None:
        """Reserve a placement group per pool, or raise if its devices are not available."""
        if self._early and list(plans) == self._early_plans:
            log.info("%d worker processes have started early", len(self._early))
        else:
            self._discard_early()
            self._reserve(plans)
        for pool, group in self._groups.items():
            if not await asyncio.to_thread(group.wait, RESERVE_TIMEOUT_S):
                devices = [device for plan in plans if plan.pool == pool for device in plan.devices]
                raise ConfigError(
                    f"pool {pool!r} waited {RESERVE_TIMEOUT_S:g} s for "
                    f"{', '.join(map(str, devices))}: they are in use; free now: {free_devices()}"
                )

    def _reserve(self, plans: Sequence[PlannedWorker]) -> None:
        shared = Counter(device for plan in plans for device in plan.devices)
        for pool in dict.fromkeys(plan.pool for plan in plans):
            members = [plan for plan in plans if plan.pool == pool]
            devices = [device for plan in members for device in plan.devices]
            group = self._groups[pool] = placement_group(
                [{"GPU" if self._gpus else "CPU": 1 / shared[device]} for device in devices],
                strategy="PACK",
                bundle_label_selector=[{"ray.io/node-id": device.node} for device in devices],
            )
            indices = iter(range(len(devices)))
            for plan in members:
                self._bundles[plan.name] = group, [next(indices) for _ in plan.devices]

    def _discard_early(self) -> None:
        if not self._early:
            return
        for actor in self._early.values():
            ray.kill(actor)
        for group in self._groups.values():
            remove_placement_group(group)
        for state in (self._early, self._early_plans, self._groups, self._bundles, self._started):
            state.clear()

    def start(self, plan: PlannedWorker, rank: int) -> tuple[str, Any]:
        """Start a rank, unless it has started early. Return its node and its actor."""
        if actor := self._early.pop((plan.name, rank), None):
            return plan.devices[rank].node, actor
        return self._start(plan, rank)

    def _start(self, plan: PlannedWorker, rank: int) -> tuple[str, Any]:
        """Start on the reserved device; a late worker on the node with the fewest workers."""
        if plan.name in self._bundles:
            group, indices = self._bundles[plan.name]
            node = plan.devices[rank].node
            share = group.bundle_specs[indices[rank]].get("GPU", 0)
            where: dict[str, Any] = {
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, indices[rank])
            }
        else:
            node, share = self._emptiest(), float(self._gpus)
            where = (
                {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
                if self._gpus
                else preferred(node)
            )
        self._started[node] += 1
        environment = {name: str(plan.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        # The bundle reserves a CPU slot; the actor does not take it again, so that a replacement
        # does not wait for the old worker to end.
        return node, _start_actor(environment, num_cpus=0, num_gpus=share, **where)

    def _emptiest(self) -> str:
        free = free_devices()
        able = [
            node
            for node in self.nodes
            if not self._gpus or free.get(node.name, {}).get("GPU", 0) >= 1
        ]
        if not able:
            raise PacelineError(f"no GPU is free for another worker; free now: {free}")
        return min(able, key=lambda node: self._started[node.name] / max(1, len(node.devices))).name

    def start_without(self, name: str) -> tuple[str, Any]:
        """Start a worker without a device on the node with the fewest per CPU slot.

        Nodes can join and leave. Return the node and the actor.
        """
        slots = cpu_slots()  # without a pause: others wait for the worker once it is listed
        if not slots:
            raise WorkerDied(f"worker {name!r} cannot start: no node of the Ray cluster is alive")
        self._without_device.pop(name, None)  # a replacement takes the place of the lost one
        taken = Counter(self._without_device.values())
        node = min(slots, key=lambda node: taken[node] / max(1, slots[node]))
        self._without_device[name] = node
        # Without GPUs, CPU slots are the devices of the pools, which may have reserved them.
        return node, _start_actor({}, num_cpus=int(self._gpus), **preferred(node))

    def leave(self) -> None:
        """Release what is reserved, and disconnect."""
        for group in self._groups.values():
            with contextlib.suppress(RayError):
                remove_placement_group(group)
        ray.shutdown()


def _start_actor(environment: dict[str, str], **options: Any) -> Any:
    return (
        ray.remote(RayHost)
        .options(max_restarts=0, max_task_retries=0, max_concurrency=8, **options)
        .remote(environment | {"TOKENIZERS_PARALLELISM": "false"})
    )
