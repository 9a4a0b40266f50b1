"""Threads of the C library OpenMP, with which torch uses several cores."""

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

MAPS = Path("/proc/self/maps")  # only Linux has it
SOFT = 1  # the library may keep its settings


def end_idle_threads() -> None:
    """End the OpenMP threads of the calling thread; its next operation starts them again.

    Every thread that has used torch keeps its own. If there are more of them than cores, all sleep
    between operations instead of waiting actively, also those of a run in another thread: a small
    model then generates at half the speed.
    """
    if "torch" not in sys.modules:
        return
    with suppress(OSError, AttributeError):
        lines = (line.split() for line in MAPS.read_text().splitlines())
        for path in {line[-1] for line in lines if "libgomp" in line[-1]}:
            ctypes.CDLL(path).omp_pause_resource_all(SOFT)
