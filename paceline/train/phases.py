"""Peak memory of each phase of a worker whose roles take turns: generate, train, and the hand-over of weights between the two.

On a GPU it is what is in use when the phase ends, by everybody: allocators keep what they once had until it is given back, which
happens between phases. On a CPU it is the most this process held since the phase began (Linux; elsewhere since it was started).
"""

from paceline.remote.host import take_peak_memory

START, GENERATE, TRAIN, HAND_OVER = "start", "generate", "train", "sync"


class Phases:
    def __init__(self) -> None:
        self._now = START
        self._peaks: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        """Called before what the last phase used is given back."""
        self._peaks[self._now] = max(self._peaks.get(self._now, 0), _peak())
        self._now = phase

    def metrics(self) -> dict[str, float]:
        """Bytes, of the phases that ended since this was last asked."""
        peaks, self._peaks = self._peaks, {}
        return {f"memory/{phase}_bytes": float(peak) for phase, peak in peaks.items()}


def _peak() -> int:
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    return take_peak_memory()
