"""The sandbox that bubblewrap makes of Linux namespaces.

It has no network, the system's programs and Python as its only files, read-only, and temporary
directories that vanish. Started by root, it drops to a user ID that nothing else has.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.sandbox.seccomp import program_filter
from paceline.sandbox.supervisor import Limits, NotStarted, Result, supervise

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
CODE = "/tmp/program.py"
LAUNCHER = Path(__file__).with_name("launch.py")
TRIAL = Limits(timeout_s=20, cpu_s=20, memory_mb=1024, processes=16, output_kb=64, disk_mb=1)

# Nothing of the caller's environment: variables of programs that would start a thread per core.
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Unavailable(Exception):
    """Bubblewrap is missing or does not work here."""


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    program: str
    as_root: bool  # namespaces of root, whose user ID is dropped inside; else a user namespace
    with_proc: bool  # some containers do not allow to mount /proc
    with_size: bool  # version 0.7 and later limit the size of temporary files

    def run(
        self,
        code: str,
        stdin: str | socket.socket,
        limits: Limits,
        readable: Sequence[Path],
        ended: threading.Event | None = None,
    ) -> Result:
        """Run the code. Raises NotStarted."""
        with contextlib.ExitStack() as stack:
            ready, started = os.pipe()
            stack.callback(os.close, ready)
            with open(started, "wb", buffering=0):
                text = stdin if isinstance(stdin, str) else ""
                inputs = {
                    name: stack.enter_context(_memory_file(data))
                    for name, data in (
                        ("code", code.encode(errors="replace")),
                        ("stdin", text.encode(errors="replace")),
                        ("filter", program_filter() or b""),
                    )
                }
                process = subprocess.Popen(
                    [
                        *self._arguments(inputs["code"], inputs["filter"], limits, readable),
                        *launch(sys.executable, started, self._uid(), limits, limits.processes),
                        *(sys.executable, "-I", "-B", CODE),
                    ],
                    stdin=inputs["stdin"] if isinstance(stdin, str) else stdin.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[started, inputs["code"], inputs["filter"]],
                    start_new_session=True,
                    env=ENVIRONMENT,
                    cwd="/",
                )
            if isinstance(stdin, socket.socket):
                stdin.close()  # so that the other program notices when this one ends
            return supervise(process, ready, limits, "bubblewrap", ended)

    def _uid(self) -> int:
        # The kernel counts processes by user, so each sandbox has its own.
        return 2**30 + secrets.randbelow(2**30) if self.as_root else 0

    def _arguments(
        self, code: int, syscalls: int, limits: Limits, readable: Sequence[Path]
    ) -> list[str]:
        size = ["--size", str(limits.disk_mb * 2**20)] if self.with_size else []
        temporary = [[*size, "--perms", "1777", "--tmpfs", path] for path in ("/tmp", "/dev/shm")]
        user = ["--unshare-user", "--uid", "65534", "--gid", "65534"]
        root = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        return [
            *(self.program, "--die-with-parent", "--new-session"),
            *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"),
            *("--unshare-cgroup-try", "--hostname", "sandbox"),
            *(root if self.as_root else user),
            *(["--proc", "/proc"] if self.with_proc else []),
            # Shared mappings of /dev/zero are memory that no limit counts: it cannot be opened.
            *("--dev", "/dev", "--ro-bind", "/dev/null", "/dev/zero"),
            *(*temporary[1], "--remount-ro", "/dev", *temporary[0]),
            *_mounts(readable),
            *("--perms", "0444", "--ro-bind-data", str(code), CODE),
            *("--remount-ro", "/", "--chdir", "/tmp"),
            *(["--seccomp", str(syscalls)] if program_filter() else []),
            "--",
        ]


def launch(python: str, ready: int, uid: int, limits: Limits, processes: int) -> list[str]:
    """Return the command that sets the limits and then runs the command that follows it."""
    numbers = [limits.memory_mb * 2**20, -(-limits.cpu_s // 1), processes, limits.disk_mb * 2**20]
    arguments = [str(int(number)) for number in (ready, uid, *numbers)]
    return [python, "-I", "-S", "-c", LAUNCHER.read_text(), *arguments]


def _mounts(readable: Sequence[Path]) -> Iterator[str]:
    """Yield the arguments for what the sandbox can read, at the same paths as outside."""
    for path in SYSTEM:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        else:
            yield from ("--ro-bind-try", path, path)
    for path in SETTINGS:
        yield from ("--ro-bind-try", path, path)
    for path in (*_python(), *map(str, readable)):
        if not path.startswith("/usr/"):
            for parent in (*reversed(Path(path).parents),)[1:]:
                yield from ("--dir", str(parent))  # else only root can enter it
            yield from ("--ro-bind", path, path)


def _python() -> Iterator[str]:
    """Yield the directories of the interpreter: of its environment and of its installation."""
    for path in dict.fromkeys((sys.prefix, sys.base_prefix)):
        if path in ("/", os.path.expanduser("~")):
            raise Unavailable(f"Python is installed in {path}, which the sandbox would show")
        if path != "/usr":
            yield path
    links = [sys.executable]
    while os.path.islink(links[-1]):  # for example ~/bin/python -> /opt/python/bin/python3
        target = os.path.join(os.path.dirname(links[-1]), os.readlink(links[-1]))
        links.append(os.path.normpath(target))
    for link in links:
        if not link.startswith((f"{sys.prefix}/", f"{sys.base_prefix}/", "/usr/", "/bin/")):
            yield os.path.dirname(link)


@contextlib.contextmanager
def _memory_file(data: bytes) -> Iterator[int]:
    """Open a file in memory that can only be read."""
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def find() -> Bubblewrap:
    """Return the strongest form of bubblewrap that works here. Raises Unavailable."""
    program = shutil.which("bwrap")
    if sys.platform != "linux" or program is None:
        raise Unavailable("bubblewrap is not installed (Linux: apt install bubblewrap)")
    with_size = b"--size" in subprocess.run([program, "--help"], capture_output=True).stdout
    # Root would stay the owner of the files of root in a user namespace, also of /proc/sys.
    as_root = os.geteuid() == 0
    problems = []
    for with_proc in (True, False):
        found = Bubblewrap(program, as_root, with_proc, with_size)
        try:
            result = found.run("print(6 * 7)", "", TRIAL, ())
            if result.stdout == "42\n":
                return found
            problems.append(f"Python does not run in it: {result.stderr.strip()[-500:]}")
        except NotStarted as e:
            problems.append(str(e))
    hint = "; run as another user than root, or" if as_root else ";"
    raise Unavailable(
        f"bubblewrap cannot make a sandbox here ({problems[0]}){hint} "
        "allow this container or user to create namespaces (docs/sandbox.md)"
    )
