"""What a run has left behind: processes, shared memory, sockets and temporary files.

A run gets a mark in its environment and a directory for temporary files, so that other programs on
the machine do not count.
"""

import os
import secrets
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MARK = "PACELINE_BENCH_MARK"  # environment variable of all processes of a run
SHARED_MEMORY = Path("/dev/shm")
GRACE_S = 10.0  # for processes that are ending
# torch makes this directory when it is imported.
OF_LIBRARIES = ("torchinductor_",)


class Leftovers:
    def __init__(self, temporary: Path) -> None:
        """`temporary`: an empty directory for the temporary files of the run."""
        self._mark, self._temporary = secrets.token_hex(8), temporary
        self._shared = _listed(SHARED_MEMORY)

    @property
    def environment(self) -> dict[str, str]:
        return {MARK: self._mark, "TMPDIR": str(self._temporary)}

    def processes(self) -> list[int]:
        """Return the processes that have the mark."""
        wanted, found = f"{MARK}={self._mark}".encode(), []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                with suppress(OSError):  # it ended, or it is of another user
                    if wanted in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return found

    def find(self, run_dir: Path) -> dict[str, list[str]]:
        """Return the names of what is left, by kind."""
        _settle(lambda: not self.processes())
        return {
            "processes": [_command(pid) for pid in self.processes()],
            "shared memory": sorted(_unused(_listed(SHARED_MEMORY) - self._shared)),
            "sockets": [
                str(path) for folder in (run_dir, self._temporary) for path in _sockets(folder)
            ],
            "temporary files": [
                path.name
                for path in self._temporary.iterdir()
                if not path.name.startswith(OF_LIBRARIES) and not path.is_socket()
            ],
            "unfinished checkpoints": [p.name for p in (run_dir / "checkpoints").glob(".*")],
        }


def descriptors() -> dict[str, int]:
    """Return how many descriptors of each kind this process has."""
    counts: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            kind = target.split(":")[0] if target.startswith(("socket", "pipe", "anon")) else "file"
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def listening_sockets() -> int:
    """Return how many sockets of this process accept connections."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    count += found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return count


def _settle(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GRACE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def _listed(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def _unused(names: set[str]) -> set[str]:
    """Return those that no process has mapped or open: other programs use theirs."""
    if not names:
        return names
    used: list[str] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                used.append((folder / "maps").read_text())
                used += [os.readlink(path) for path in (folder / "fd").iterdir()]
    text = "\n".join(used)
    return {name for name in names & _listed(SHARED_MEMORY) if name not in text}


def _sockets(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_socket()]


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    return str(pid)
