"""This machine as a cluster: each pool is a process with its own cores, or a thread if it is the
only one and has no GPU."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.remote.process import ProcessWorker, process_group
from paceline.remote.thread import ThreadWorker
from paceline.remote.worker import Worker
from paceline.workers.build import build_parts, first_rank_only
from paceline.workers.cluster import Node, PlannedWorker, available_cores


class LocalCluster:
    def __init__(self, config: RunConfig, model_path: str, log_folder: Path) -> None:
        self._config, self._model_path, self._logs = config, model_path, log_folder
        self._gpus: dict[str, list[int]] = {}  # by worker
        log_folder.mkdir(parents=True, exist_ok=True)

    def nodes(self) -> list[Node]:
        return [this_machine()]

    async def reserve(self, plans: Sequence[PlannedWorker]) -> None:
        """Do nothing: the run may use everything on this machine."""

    async def start(self, plan: PlannedWorker) -> Worker:
        args = (plan.roles, self._config, self._model_path, plan.threads)
        if plan.ranks:
            return process_group(
                plan.name,
                build_parts,
                args,
                ranks=plan.ranks,
                threads=plan.threads,
                log_folder=self._logs,
                cores=plan.cores,
                gpus=self.gpus(plan),
                first_only=first_rank_only(plan.roles),
            )
        gpus = self.gpus(plan)
        if plan.alone and not gpus:
            return ThreadWorker(plan.name, build_parts, args)
        # Beside a GPU, the controller would hold the interpreter lock while the GPU waits for work.
        return ProcessWorker(
            plan.name,
            build_parts,
            args,
            cores=list(plan.cores),
            threads=plan.threads,
            log_path=self._logs / f"{plan.name}.log",
            gpu=next(iter(gpus), None),
        )

    def launcher(self) -> None:
        return None

    def gpus(self, plan: PlannedWorker) -> list[int]:
        """Return the GPUs of its ranks: as planned, or the least used ones for a late worker."""
        if count := _count_gpus()[0]:
            used = Counter(
                index for name, taken in self._gpus.items() if name != plan.name for index in taken
            )
            if not plan.devices and plan.processes > count:
                raise ConfigError(
                    f"worker {plan.name!r} needs {plan.processes} GPUs, and this machine has "
                    f"{count}; lower rollout.tensor_parallel x rollout.pipeline_parallel"
                )
            free_first = sorted(range(count), key=lambda index: used[index])
            planned = [device.index for device in plan.devices]
            self._gpus[plan.name] = planned or free_first[: plan.processes]
        return self._gpus.get(plan.name, [])

    async def close(self) -> None:
        """Do nothing: the caller closes the workers."""


def this_machine() -> Node:
    cores = available_cores()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus, gpu_memory = _count_gpus()
    return Node(
        "local", len(cores), gpus, memory, gpu_memory, tuple(cores), _gpu_name(), _capability()
    )


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.device_count() else ""


def _capability() -> int:
    import torch

    found = (torch.cuda.get_device_capability(i)[0] for i in range(torch.cuda.device_count()))
    return min(found, default=0)


def _count_gpus() -> tuple[int, int]:
    """Return the number of GPUs and the memory of the smallest."""
    import torch

    count = torch.cuda.device_count()
    return count, min(
        (torch.cuda.get_device_properties(index).total_memory for index in range(count)), default=0
    )
