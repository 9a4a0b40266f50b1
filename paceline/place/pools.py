"""From placement to workers: one worker per pool (more for several engines), each with its share of the cores."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from paceline.config import RunConfig
from paceline.errors import PacelineError, WorkerDied
from paceline.place.build import build_parts
from paceline.place.local import ProcessWorker, ThreadWorker, Worker
from paceline.types import Role

START_TIMEOUT_S = 300.0  # a cold import of torch on a slow disk takes its time


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    name: str
    roles: tuple[Role, ...]
    threads: int
    cores: tuple[int, ...]  # empty = not pinned


def plan_workers(config: RunConfig) -> list[PlannedWorker]:
    """Who runs where. A pool that hosts several roles is one worker, so they take turns."""
    used = [Role.ACTOR, Role.ROLLOUT]
    used += [Role.CRITIC] if config.algorithm.needs_critic else []
    used += [Role.REF] if config.algorithm.needs_reference else []
    used += [Role.REWARD] if config.reward.model else []
    pools: dict[str, list[Role]] = {}
    for role in used:
        pools.setdefault(config.placement.pool(role), []).append(role)
    names = [(pool, tuple(roles)) for pool, roles in pools.items()]
    rollout_pool = config.placement.pool(Role.ROLLOUT)
    names += [(f"{rollout_pool}-{number}", (Role.ROLLOUT,)) for number in range(1, config.placement.rollout_workers)]
    cores = _available_cores()
    threads = config.placement.threads or max(1, len(cores) // len(names))
    pinned = len(names) > 1 and threads * len(names) <= len(cores)
    return [
        PlannedWorker(name, roles, threads, tuple(cores[i * threads : (i + 1) * threads]) if pinned else ())
        for i, (name, roles) in enumerate(names)
    ]


async def start_workers(config: RunConfig, model_path: str, log_folder: Path) -> dict[Role, list[Worker]]:
    """Start all workers and wait until each has loaded its models. A single worker runs on a thread of this process."""
    plans = plan_workers(config)
    log_folder.mkdir(parents=True, exist_ok=True)
    workers: list[Worker] = []
    by_role: dict[Role, list[Worker]] = {role: [] for role in Role}
    try:
        for plan in plans:
            args = (plan.roles, config, model_path, plan.threads)
            worker: Worker
            if len(plans) == 1:
                worker = ThreadWorker(plan.name, build_parts, args)
            else:
                log_path = log_folder / f"{plan.name}.log"
                worker = ProcessWorker(plan.name, build_parts, args, cores=list(plan.cores), threads=plan.threads, log_path=log_path)
            workers.append(worker)
            for role in plan.roles:
                by_role[role].append(worker)
        async with asyncio.timeout(START_TIMEOUT_S):
            await asyncio.gather(*(_ready(worker) for worker in workers))
    except BaseException as error:
        await close_workers(by_role)
        if isinstance(error, TimeoutError):
            raise WorkerDied(f"not all workers were ready within {START_TIMEOUT_S:g} s: {[w.name for w in workers]}") from None
        raise
    return by_role


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
        raise WorkerDied(f"worker {worker.name!r} could not start: {type(error).__name__}: {error}") from error


def _available_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
