"""Memory of a run while it runs: host memory of all its processes, memory and use of its GPUs."""

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
        # wall time, bytes of host memory, bytes of GPU memory, mean GPU utilization
        self._polls: list[tuple[float, int, int, float]] = []

    def poll(self) -> None:
        host = 0
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                host += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        self._polls.append((time.time(), host, *self._gpus()))

    def gpu_growth(self) -> int:
        """Return the peak of the GPU memory in use, in bytes above the first poll."""
        used = [poll[2] for poll in self._polls]
        return max(used) - used[0]

    def between(self, begin: float, end: float) -> dict[str, list[float]]:
        polls = [poll for poll in self._polls if begin <= poll[0] <= end]
        names = ("seconds", "host", "gpu", "gpu_utilization")
        return {
            name: [poll[at] - (begin if at == 0 else 0) for poll in polls]
            for at, name in enumerate(names)
        }

    def _gpus(self) -> tuple[int, float]:
        # set by choice_from_environment; empty: no GPU
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if not (self._smi and visible):
            return 0, 0.0
        command = [
            self._smi,
            f"--id={visible}",
            "--query-gpu=memory.used,utilization.gpu",
            "--format=csv,noheader,nounits",
        ]
        output = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
        cells = output.replace("\n", ",").split(",")
        # nvidia-smi prints text such as [N/A] for values it cannot read
        numbers = [int(cell) if cell.strip().isdigit() else 0 for cell in cells if cell.strip()]
        return sum(numbers[0::2]) * MB, statistics.fmean(numbers[1::2] or [0]) / 100
