"""The phases of a worker that alternates between generation, training and sync: their peak memory,
and the engine's release of the device.

On a GPU this is what torch had in use at most during the phase, with the memory that others hold
when it ends: the driver, libraries and other processes. On a CPU it is the peak of this process
since the phase began (on Linux; elsewhere since its start), without memory that was freed before.
There only the first steps are measured: giving freed memory back costs a small step a tenth of its
time.
"""

from collections.abc import Callable
from typing import Any

from paceline.remote.peak import take_peak_memory

MEASURED = 3  # steps, on a CPU
START, GENERATE, TRAIN, SYNC = "start", "generate", "train", "sync"


class Phases:
    def __init__(self) -> None:
        # Called when a train step begins: the engine releases its memory until the next sync.
        self.release_engine: Callable[[], None] = lambda: None
        self._now = START
        self._peaks: dict[str, int] = {}
        self._reports = 0

    def enter(self, phase: str) -> None:
        """Start a phase. Call it when the memory of the last one is released: peaks include it."""
        if _on_gpu() or self._reports < MEASURED:
            self._peaks[self._now] = max(self._peaks.get(self._now, 0), _peak())
        self._now = phase

    def metrics(self) -> dict[str, float]:
        """Return the peak bytes of the phases that ended since the last call.

        In a group, all ranks must call it: the result has the highest peak and each rank's.
        """
        peaks, self._peaks = self._peaks, {}
        self._reports += 1
        ranks = _from_all_ranks(peaks)
        found: dict[str, float] = {}
        for number, rank in enumerate(ranks):
            for phase, peak in rank.items():
                name = f"memory/{phase}_bytes"
                found[name] = max(found.get(name, 0.0), float(peak))
                if len(ranks) > 1:
                    found[f"memory/rank_{number}_{phase}_bytes"] = float(peak)
        return found


def _from_all_ranks(peaks: dict[str, int]) -> list[dict[str, int]]:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return [peaks]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, peaks)
    return ranks


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _peak() -> int:
    import torch

    if _on_gpu():
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()
        peak = others + torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    return take_peak_memory()
