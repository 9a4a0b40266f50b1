"""Peak resident memory of a process."""

import ctypes
import resource
import sys
from contextlib import suppress
from pathlib import Path

_highest = 0  # of this process, before the last reset of the kernel's counter


def peak_memory() -> int:
    """Return the peak resident bytes of this process."""
    return max(_highest, _own_peak())


def take_peak_memory() -> int:
    """Return the peak resident bytes since the last call (Linux) or since the start (elsewhere).

    Memory that was freed since is given back, so that the next peak does not contain it.
    """
    global _highest
    peak = _own_peak()
    _highest = max(_highest, peak)
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak


def peak_memory_of(pid: int | str) -> int:
    """Return the peak resident bytes of a process (Linux; elsewhere 0)."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _own_peak() -> int:
    # On Linux, ru_maxrss of a started process is at least its parent's.
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak_memory_of("self") or (used if sys.platform == "darwin" else used * 1024)
