"""Peak memory of each phase of a worker whose roles alternate: generate, train, weight sync.

On a GPU it is the memory in use by all processes at the end of a phase: allocators return memory
only between phases. On a CPU it is the peak of this process since the phase began (Linux) or since
the process started (other systems).
"""

from paceline.remote.host import take_peak_memory

START, GENERATE, TRAIN, HAND_OVER = "start", "generate", "train", "sync"


class Phases:
    def __init__(self) -> None:
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
