"""Joining a Ray cluster: when a run opens it, or early.

A restarted run joins early: worker processes start while the controller loads its libraries. Its
settings were valid before, so the processes need not wait for the checks of a start. They load no
model: the run gives them their work, or discards them if its plan has changed.
"""

import asyncio
import atexit
import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from paceline.config import RunConfig
from paceline.workers.cluster import Node, PlannedWorker
from paceline.workers.pools import plan_workers, training_roles
from paceline.workers.ray.devices import RayDevices

log = logging.getLogger(__name__)

_early: Future[RayDevices | None] | None = None  # of this process, as Ray's connection


def start_last_workers(config: RunConfig) -> None:
    """Start the worker processes that the run had at its last start."""

    def plan(nodes: Sequence[Node]) -> list[PlannedWorker]:
        # The last checkpoint has these settings too, but all of it would be read to verify it.
        recorded = Path(config.run_dir, "settings.json").read_text()
        before = RunConfig.model_validate(json.loads(recorded))
        return plan_workers(before, nodes, training_roles(before))

    start_early(config.ray.address, plan)


def start_early(address: str, plan: Callable[[Sequence[Node]], Sequence[PlannedWorker]]) -> None:
    """Join a cluster and start the processes of workers, on a thread while the caller continues.

    The next cluster that this process opens has them, if they are those of its plan.
    """
    global _early
    future = _early = Future()

    def start() -> None:
        devices = None
        try:
            devices = RayDevices(address)
            devices.start_early(plan(devices.nodes))
            future.set_result(devices)
        except BaseException as error:  # the run tries it again, and reports what fails then
            log.info("no worker starts early: %s", error)
            try:
                if devices:
                    devices.leave()
            finally:
                future.set_result(None)
        # The kernel ends Ray's processes with the thread that started them.
        threading.Event().wait()

    atexit.register(future.result)  # a program that ends meanwhile waits
    threading.Thread(target=start, name="early start", daemon=True).start()


def take_devices(address: str) -> RayDevices:
    """Join the cluster at this address, unless this process has joined it early."""
    global _early
    early, _early = _early, None
    joined = early.result() if early else None
    return joined or RayDevices(address)


async def find_ray_nodes(address: str) -> list[Node]:
    """Return the nodes of a cluster without reserving anything."""
    if _early and (early := await asyncio.to_thread(_early.result)):
        return early.nodes
    return await asyncio.to_thread(_join_and_leave, address)


def _join_and_leave(address: str) -> list[Node]:
    """Return the nodes. One call, so that a thread whose caller is cancelled leaves too."""
    devices = RayDevices(address)
    devices.leave()
    return devices.nodes
