"""The phases of a worker that alternates between generation, training and sync: their peak memory,
and the engine's release of the device.

On a GPU this is the memory in use by all processes when the phase ends: allocators keep what they
had until it is released between phases. On a CPU it is the peak of this process since the phase
began (on Linux; elsewhere since its start).
"""

from collections.abc import Callable

from paceline.remote.peak import take_peak_memory

START, GENERATE, TRAIN, SYNC = "start", "generate", "train", "sync"


class Phases:
    def __init__(self) -> None:
        # Called when a train step begins: the engine releases its memory until the next sync.
        self.release_engine: Callable[[], None] = lambda: None
        self._now = START
        self._peaks: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        """Start a phase. Call it before the memory of the last phase is released."""
        self._peaks[self._now] = max(self._peaks.get(self._now, 0), _peak())
        self._now = phase

    def metrics(self) -> dict[str, float]:
        """Return the peak bytes of the phases that ended since the last call."""
        peaks, self._peaks = self._peaks, {}
        return {f"memory/{phase}_bytes": float(peak) for phase, peak in peaks.items()}


def _peak() -> int:
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    return take_peak_memory()
