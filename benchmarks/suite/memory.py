"""Memory of a case while it runs: of all its processes, and of the GPUs it may use; and how busy these say they are."""

import os
import shutil
import statistics
import subprocess
import time

import psutil

MB = 1 << 20


class Memory:
    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._smi = shutil.which("nvidia-smi")
        self._looks: list[
            tuple[float, int, int, float]
        ] = []  # wall time, bytes of the host, bytes of the GPUs, their mean use

    def look(self) -> None:
        host = 0
        try:
            family = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in family:
            try:
                host += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        self._looks.append((time.time(), host, *self._gpus()))

    def gpu_growth(self) -> int:
        """Bytes of the GPUs, at most, above what was taken when it was first looked."""
        taken = [look[2] for look in self._looks]
        return max(taken) - taken[0]

    def between(self, begin: float, end: float) -> dict[str, list[float]]:
        looks = [look for look in self._looks if begin <= look[0] <= end]
        names = ("seconds", "host", "gpu", "gpu_use")
        return {
            name: [look[at] - (begin if at == 0 else 0) for look in looks]
            for at, name in enumerate(names)
        }

    def _gpus(self) -> tuple[int, float]:
        ours = os.environ.get("CUDA_VISIBLE_DEVICES")  # `take` has set it; empty = none
        if not (self._smi and ours):
            return 0, 0.0
        command = [
            self._smi,
            f"--id={ours}",
            "--query-gpu=memory.used,utilization.gpu",
            "--format=csv,noheader,nounits",
        ]
        cells = (
            subprocess.run(command, capture_output=True, text=True, timeout=10)
            .stdout.replace("\n", ",")
            .split(",")
        )
        numbers = [
            int(cell) if cell.strip().isdigit() else 0 for cell in cells if cell.strip()
        ]  # what it cannot tell is not a number
        return sum(numbers[0::2]) * MB, statistics.fmean(numbers[1::2] or [0]) / 100
