"""From placement to workers: one worker per pool (more for several engines), each with its share of the cores.

A pool that trains with a back end of several ranks is a group of processes; the engine or reward model in it lives on the first.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.errors import PacelineError, WorkerDied
from paceline.place.build import build_parts
from paceline.place.group import WorkerGroup
from paceline.place.local import ProcessWorker, ThreadWorker, Worker
from paceline.types import Role

IN_RANKS = {Role.ACTOR, Role.CRITIC, Role.REF}
START_TIMEOUT_S = 300.0  # a cold import of torch on a slow disk takes its time


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    name: str
    roles: tuple[Role, ...]
    ranks: int  # 0 = not a group
    threads: int  # of each rank
    cores: tuple[int, ...]  # of all its ranks; empty = not pinned


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
    ranks = [_ranks(config, roles) for _, roles in names]
    processes = sum(max(1, count) for count in ranks)
    cores = _available_cores()
    threads = config.placement.threads or max(1, len(cores) // processes)
    pinned = processes > 1 and threads * processes <= len(cores)
    plans = []
    for (name, roles), count in zip(names, ranks, strict=True):
        own, cores = cores[: threads * max(1, count)], cores[threads * max(1, count) :]
        plans.append(PlannedWorker(name, roles, count, threads, tuple(own) if pinned else ()))
    return plans


async def start_workers(config: RunConfig, model_path: str, log_folder: Path) -> dict[Role, list[Worker]]:
    """Start all workers and wait until each has loaded its models. A single worker runs on a thread of this process."""
    plans = plan_workers(config)
    log_folder.mkdir(parents=True, exist_ok=True)
    workers: list[Worker] = []
    by_role: dict[Role, list[Worker]] = {role: [] for role in Role}
    try:
        for plan in plans:
            worker = _start(plan, (plan.roles, config, model_path, plan.threads), len(plans) == 1, log_folder)
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


def _ranks(config: RunConfig, roles: Sequence[Role]) -> int:
    return config.placement.train_ranks if config.train.backend != "single" and IN_RANKS & set(roles) else 0


def _start(plan: PlannedWorker, args: tuple[Any, ...], alone: bool, log_folder: Path) -> Worker:
    if plan.ranks:
        return WorkerGroup(
            plan.name,
            build_parts,
            args,
            ranks=plan.ranks,
            threads=plan.threads,
            log_folder=log_folder,
            cores=plan.cores,
            first_only=set(plan.roles) - IN_RANKS,
        )
    if alone:
        return ThreadWorker(plan.name, build_parts, args)
    log_path = log_folder / f"{plan.name}.log"
    return ProcessWorker(plan.name, build_parts, args, cores=list(plan.cores), threads=plan.threads, log_path=log_path)


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
