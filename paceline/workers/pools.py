"""Plans and starts workers: one per pool, more for several engines, each with its devices and
cores.

A pool that trains with several ranks is a group of processes, and so is an engine of several
devices.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from paceline.config import RunConfig
from paceline.errors import PacelineError, WorkerDied
from paceline.placement import TRAINED_ROLES
from paceline.remote.stacks import unanswered, write_stacks
from paceline.remote.worker import Worker
from paceline.types import Role
from paceline.workers.cluster import Cluster, Device, Node, PlannedWorker
from paceline.workers.devices import Placement
from paceline.workers.hardware import report_devices


async def open_cluster(config: RunConfig, model_path: str, log_folder: Path) -> Cluster:
    if config.cluster == "ray":
        from paceline.workers.ray.cluster import RayCluster

        return await RayCluster.open(config, model_path, log_folder)
    from paceline.workers.local import LocalCluster

    return LocalCluster(config, model_path, log_folder)


async def find_nodes(config: RunConfig) -> list[Node]:
    """Return the nodes that a run would use, without starting it."""
    from paceline.workers.local import this_machine

    if config.cluster == "local" or config.ray.address == "local":
        return [this_machine()]
    from paceline.workers.ray.joining import find_ray_nodes

    return await find_ray_nodes(config.ray.address)


def plan_workers(
    config: RunConfig, nodes: Sequence[Node], roles: Sequence[Role] | None = None
) -> list[PlannedWorker]:
    """Plan which worker runs where. Roles of one pool share a worker, so they alternate."""
    pools: dict[str, list[Role]] = {}
    for role in roles or training_roles(config):
        pools.setdefault(config.placement.pool(role), []).append(role)
    workers = _assign(config, nodes, pools)
    devices = [own for *_, own in workers]
    threads = _threads(config, nodes, devices)
    cores = {node.name: list(node.cores) for node in nodes}
    pinned = sum(map(len, devices)) > 1 and all(
        count * threads <= len(cores[node])
        for node, count in Counter(d.node for each in devices for d in each).items()
    )
    # vLLM changes the process it is in: not the controller's.
    alone = len(workers) == 1 and config.rollout.engine == "native"
    plans = []
    for name, pool, own_roles, own in workers:
        taken = (
            [cores[device.node].pop(0) for device in own for _ in range(threads)] if pinned else []
        )
        ranks = len(own) if _is_group(config, own_roles) else 0
        plans.append(
            PlannedWorker(name, tuple(own_roles), ranks, threads, tuple(taken), pool, own, alone)
        )
    return plans


@dataclass(frozen=True, slots=True)
class _Demand:
    """The devices that a pool asks for."""

    unit: int  # devices that belong together: a replica of the model, or an engine
    units: int | None  # None: as many as its part of the GPUs holds
    trains: bool  # one worker with all units; otherwise one worker per unit
    setting: str  # the one to lower if a worker does not fit

    def units_of(self, devices: Sequence[Device]) -> int:
        """Return how many units these devices hold; an engine is on one node if one is enough."""
        nodes = Counter(device.node for device in devices)
        near = 0 if self.trains else sum(count // self.unit for count in nodes.values())
        return max(1, near or len(devices) // self.unit)


def _assign(
    config: RunConfig, nodes: Sequence[Node], pools: Mapping[str, Sequence[Role]]
) -> list[tuple[str, str, Sequence[Role], tuple[Device, ...]]]:
    """Return name, pool, roles and devices of each worker.

    A pool without a count gets its part of the GPUs that the counted ones leave; without GPUs, one
    unit.
    """
    placement = Placement(nodes, list(pools))
    demands = {pool: _demand(config, roles) for pool, roles in pools.items()}
    counted = {pool: demand.units for pool, demand in demands.items() if demand.units is not None}
    taken = {pool: _take(placement, pool, demands[pool], units) for pool, units in counted.items()}
    others = {pool: demand.unit for pool, demand in demands.items() if pool not in counted}
    for pool, part in placement.fill(others).items():
        taken[pool] = _take(placement, pool, demands[pool], demands[pool].units_of(part))
    return [
        (f"{pool}-{number}", pool, [Role.ROLLOUT], own) if number else (pool, pool, roles, own)
        for pool, roles in pools.items()
        for number, own in enumerate(taken[pool])
    ]


def _demand(config: RunConfig, roles: Sequence[Role]) -> _Demand:
    engine = config.rollout.ranks if Role.ROLLOUT in roles else 1
    if not set(TRAINED_ROLES) & set(roles):
        units = config.placement.rollout_workers if Role.ROLLOUT in roles else 1
        several = "rollout.tensor_parallel x rollout.pipeline_parallel"
        setting = several if config.rollout.pipeline_parallel > 1 else "rollout.tensor_parallel"
        return _Demand(engine, units, False, setting)
    if config.train.backend == "single":
        return _Demand(1, 1, True, "placement.train_ranks")
    ranks = config.placement.train_ranks
    replica = config.train.tensor_parallel * config.train.pipeline_parallel
    if ranks is not None:
        return _Demand(replica, ranks // replica, True, "placement.train_ranks")
    unit = math.lcm(replica, engine)
    return _Demand(unit, None, True, "train.tensor_parallel x train.pipeline_parallel")


def _take(placement: Placement, pool: str, demand: _Demand, units: int) -> list[tuple[Device, ...]]:
    """Take the devices of each worker of a pool."""
    workers = 1 if demand.trains else units
    ranks = demand.unit * units // workers
    return [placement.take(pool, ranks, demand.setting, demand.unit) for _ in range(workers)]


def training_roles(config: RunConfig) -> list[Role]:
    used = [Role.ACTOR, Role.ROLLOUT]
    used += [Role.CRITIC] if config.algorithm.needs_critic else []
    used += [Role.REF] if config.algorithm.needs_reference else []
    used += [Role.REWARD] if config.reward.model else []
    return used


def _is_group(config: RunConfig, roles: Sequence[Role]) -> bool:
    """Return whether a worker is a group of ranks, of one rank too."""
    if set(TRAINED_ROLES) & set(roles):
        return config.train.backend != "single"
    return Role.ROLLOUT in roles and config.rollout.ranks > 1


def _threads(config: RunConfig, nodes: Sequence[Node], devices: Sequence[Sequence[Device]]) -> int:
    """Return the threads of each process: as set, or the cores of the fullest node shared out."""
    processes = Counter(device.node for own in devices for device in own)
    return config.placement.threads or max(
        1, min(node.cpus // processes[node.name] for node in nodes if processes[node.name])
    )


async def open_workers(
    stack: AsyncExitStack,
    config: RunConfig,
    roles: Sequence[Role],
    model_path: str,
    log_folder: Path,
) -> tuple[Cluster, list[PlannedWorker], dict[Role, list[Worker]]]:
    """Start all workers of a run. The stack closes them."""
    cluster = await open_cluster(config, model_path, log_folder)
    stack.push_async_callback(cluster.close)
    nodes = cluster.nodes()
    plans = plan_workers(config, nodes, roles)
    report_devices(config, nodes, plans)
    workers = await start_workers(cluster, plans, config.start_timeout_s, log_folder)
    stack.push_async_callback(close_workers, workers)
    return cluster, plans, workers


async def start_workers(
    cluster: Cluster, plans: Sequence[PlannedWorker], limit_s: float, log_folder: Path | None = None
) -> dict[Role, list[Worker]]:
    """Start all workers and wait until each has loaded its models.

    If that takes longer than `limit_s`, their stacks go to the log folder.
    """
    workers: list[Worker] = []
    by_role: dict[Role, list[Worker]] = {role: [] for role in Role}
    try:
        async with asyncio.timeout(limit_s):
            await cluster.reserve(plans)
            for plan in plans:
                worker = await _start(cluster, plan)
                workers.append(worker)
                for role in plan.roles:
                    by_role[role].append(worker)
            await asyncio.gather(*(_ready(worker) for worker in workers))
    except TimeoutError:
        late = [text for worker in workers for text in unanswered(worker)]
        problem = "; ".join([f"not all workers were ready within {_limit(limit_s)}", *late])
        if log_folder is not None:
            await asyncio.to_thread(write_stacks, log_folder / "stacks.txt", problem, workers)
        await close_workers(by_role)
        raise WorkerDied(problem) from None
    except BaseException:
        await close_workers(by_role)
        raise
    return by_role


async def start_worker(cluster: Cluster, plan: PlannedWorker, limit_s: float) -> Worker:
    """Start one worker during a run and wait until it has loaded its models."""
    worker: Worker | None = None
    try:
        async with asyncio.timeout(limit_s):
            worker = await _start(cluster, plan)
            await _ready(worker)
    except BaseException as error:
        if worker is not None:
            await worker.close()
        if isinstance(error, TimeoutError):
            raise WorkerDied(
                f"worker {plan.name!r} was not ready within {_limit(limit_s)}"
            ) from None
        raise
    return worker


def _limit(seconds: float) -> str:
    return f"start_timeout_s = {seconds:g} s"


async def _start(cluster: Cluster, plan: PlannedWorker) -> Worker:
    try:
        return await cluster.start(plan)
    except OSError as error:  # out of processes, files or memory
        raise WorkerDied(f"worker {plan.name!r} could not be started: {error}") from error


async def close_workers(by_role: dict[Role, list[Worker]]) -> None:
    await asyncio.gather(*(worker.close() for worker in unique_workers(by_role)))


def unique_workers(by_role: dict[Role, list[Worker]]) -> list[Worker]:
    return list({id(worker): worker for workers in by_role.values() for worker in workers}.values())


async def _ready(worker: Worker) -> None:
    try:
        await worker.ready()
    except PacelineError:
        raise
    except Exception as error:
        raise WorkerDied(
            f"worker {worker.name!r} could not start: {type(error).__name__}: {error}"
        ) from error
