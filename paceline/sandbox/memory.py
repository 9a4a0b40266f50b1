"""Memory of a sandboxed program: of its processes, and what the kernel holds for them."""

import contextlib
import os
import resource
from collections.abc import Sequence
from pathlib import Path

# What one may take at most: buffers of a socket, and a file besides its content.
SOCKET_BYTES, TCP_BYTES, FILE_BYTES = 2**19, 2**22, 2**11


def exceeds(pids: Sequence[int], allowed: int) -> bool:
    """Return whether processes use more memory than allowed. Some of them are in the sandbox.

    Any of these tells what the kernel holds for all. A process that has ended tells nothing.
    """
    held = max(map(_sockets, pids), default=0) + max(map(_files, pids), default=0)
    if held + sum(map(_private, pids)) <= allowed:
        return False
    return held + sum(map(_resident, pids)) > allowed


def _private(pid: int) -> int:
    """Return resident bytes, of which processes may share some after a fork."""
    with contextlib.suppress(OSError, ValueError):
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(resident) - int(shared)) * resource.getpagesize()
    return 0


def _resident(pid: int) -> int:
    """Return resident bytes, shared ones in parts. It takes longer than `_private`."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return _private(pid)


def _sockets(pid: int) -> int:
    """Return what the sockets may hold, also those that were closed before all data was read."""
    total = 0
    with contextlib.suppress(OSError, ValueError):
        if os.path.samefile(f"/proc/{pid}/ns/net", "/proc/self/ns/net"):
            return 0  # without a sandbox, these are the sockets of the machine
        for line in Path(f"/proc/{pid}/net/protocols").read_text().splitlines()[1:]:
            name, _, sockets, *_ = line.split()
            total += int(sockets) * (TCP_BYTES if name.startswith("TCP") else SOCKET_BYTES)
    return total


def _files(pid: int) -> int:
    """Return what the temporary files take besides their content, which is limited elsewhere."""
    total = 0
    with contextlib.suppress(OSError):
        if os.path.samefile(f"/proc/{pid}/ns/mnt", "/proc/self/ns/mnt"):
            return 0
        for folder in ("tmp", "dev/shm"):
            found = os.statvfs(f"/proc/{pid}/root/{folder}")
            total += (found.f_files - found.f_ffree) * FILE_BYTES
    return total
