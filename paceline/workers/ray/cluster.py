"""A Ray cluster on which a run starts its workers."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from paceline.config import RunConfig
from paceline.environment.remote import Launch
from paceline.errors import ConfigError, WorkerDied
from paceline.remote.group import WorkerGroup, start_rank
from paceline.remote.worker import Build, Worker
from paceline.workers.cluster import Node, PlannedWorker
from paceline.workers.ray.devices import RayDevices
from paceline.workers.ray.joining import take_devices
from paceline.workers.ray.worker import RayWorker


class RayCluster:
    def __init__(
        self, devices: RayDevices, config: RunConfig, model_path: str, log_folder: Path
    ) -> None:
        self._devices = devices
        self._config, self._model_path, self._logs = config, model_path, log_folder

    @classmethod
    async def open(cls, config: RunConfig, model_path: str, log_folder: Path) -> "RayCluster":
        if config.placement.overlap:
            raise ConfigError(
                "placement.overlap = true contradicts cluster = 'ray': it is for one process of "
                "this machine; set cluster = 'local', or give rollout a separate pool"
            )
        log_folder.mkdir(parents=True, exist_ok=True)
        joining = asyncio.create_task(asyncio.to_thread(take_devices, config.ray.address))
        try:
            devices = await asyncio.shield(joining)
        except asyncio.CancelledError:  # the thread joins nevertheless
            with contextlib.suppress(Exception):
                await asyncio.to_thread((await joining).leave)
            raise
        return cls(devices, config, model_path, log_folder)

    def nodes(self) -> list[Node]:
        return self._devices.nodes

    async def reserve(self, plans: Sequence[PlannedWorker]) -> None:
        await self._devices.reserve(plans)

    async def start(self, plan: PlannedWorker) -> Worker:
        from paceline.workers.build import build_parts, first_rank_only  # imports torch

        args = (plan.roles, self._config, self._model_path, plan.threads)
        if not plan.ranks:
            worker = self._worker(plan, 0, plan.name, f"{plan.name}.log")
            worker.begin(build_parts, args)
            return worker
        ranks = [
            self._worker(plan, rank, f"{plan.name} rank {rank}", f"{plan.name}.{rank}.log")
            for rank in range(plan.ranks)
        ]
        try:
            host, port, descriptor = await ranks[0].address()
        except BaseException as error:
            for worker in ranks:
                worker.kill()
            if isinstance(error, RayError | TimeoutError):
                raise WorkerDied(f"worker {ranks[0].name!r} could not start: {error}") from error
            raise
        for rank, worker in enumerate(ranks):
            store = f"tcp://{host}:{port}" + (f"?fd={descriptor}" if rank == 0 else "")
            worker.begin(start_rank, (rank, plan.ranks, store, build_parts, args))
        return WorkerGroup(plan.name, ranks, first_rank_only(plan.roles))

    def _worker(self, plan: PlannedWorker, rank: int, name: str, log_name: str) -> RayWorker:
        node, actor = self._devices.start(plan, rank)
        return RayWorker(name, node, self._devices.addresses[node], actor, self._logs / log_name)

    def launcher(self) -> Launch:
        return self._launch

    async def _launch(self, name: str, build: Build, args: tuple[Any, ...]) -> Worker:
        """Start a worker without a device on any node."""
        node, actor = self._devices.start_without(name)
        worker = RayWorker(name, node, "127.0.0.1", actor, self._logs / f"{name}.log")
        worker.begin(build, args)
        return worker

    async def close(self) -> None:
        await asyncio.to_thread(self._devices.leave)
