"""Memory of a case while it runs: of all its processes, and of the GPUs."""

import shutil
import subprocess
import time

import psutil

MB = 1 << 20


class Memory:
    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._smi = shutil.which("nvidia-smi")
        self._looks: list[tuple[float, int, int]] = []  # wall time, bytes of the host, bytes of all GPUs

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
        self._looks.append((time.time(), host, self._gpus()))

    def between(self, begin: float, end: float) -> dict[str, list[float]]:
        looks = [look for look in self._looks if begin <= look[0] <= end]
        return {"seconds": [look[0] - begin for look in looks], "host": [look[1] for look in looks], "gpu": [look[2] for look in looks]}

    def _gpus(self) -> int:
        if not self._smi:
            return 0
        command = [self._smi, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=10)
        return sum(int(number) for number in asked.stdout.split() if number.isdigit()) * MB
