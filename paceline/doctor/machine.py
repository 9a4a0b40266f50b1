"""Memory, shared memory, disks, limits, ports, sandbox and clock of this machine."""

import os
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from paceline import sandbox
from paceline.doctor.finding import Finding, ok, problem, warning
from paceline.errors import ConfigError
from paceline.model.cache import cache_folder

GIB = 2**30
MIN_MEMORY = 2 * GIB
MIN_SHARED = GIB  # containers have 64 MiB by default
MIN_DISK, LOW_DISK = GIB // 2, 10 * GIB
MIN_FILES, LOW_FILES = 256, 1024


def check_machine(
    run_dir: Path,
    shared_memory: Path = Path("/dev/shm"),
    weights_bytes: int = 0,
    needs_sandbox: bool = False,
) -> Iterator[Finding]:
    """Yield the findings. `weights_bytes`: what a weight sync puts into shared memory."""
    yield _check_memory()
    if shared_memory.is_dir():
        yield check_shared(shared_memory, shutil.disk_usage(shared_memory).free, weights_bytes)
    yield _check_disk("disk of runs", run_dir)
    yield _check_disk("disk of models", _model_cache())
    yield _check_disk("disk of conversions", cache_folder())
    yield check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield _check_loopback()
    yield _check_sandbox(needs_sandbox)
    yield check_clock(time.time())


def _check_memory() -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = _available() or total
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB available, {os.cpu_count()} cores"
    if free < MIN_MEMORY:
        return warning("memory", text, "end other programs, or use a smaller model")
    return ok("memory", text)


def _available() -> int:
    """Return the bytes that can be allocated without swapping (Linux), or 0."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def check_shared(path: Path, free: int, weights: int) -> Finding:
    text = f"{free / GIB:.1f} GiB free in {path}"
    advice = f"docker run --shm-size=8g; without a container: mount -o remount,size=8G {path}"
    if weights > free:
        need = f"the weights of the model take {weights / GIB:.1f} GiB"
        return problem("shared memory", f"{text}, but {need}", advice)
    if free < MIN_SHARED:
        return warning("shared memory", f"{text}; larger models need more", advice)
    return ok("shared memory", text)


def _check_disk(check: str, path: Path) -> Finding:
    path = path.absolute()
    existing = next(p for p in (path, *path.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    text = f"{free / GIB:.1f} GiB free for {path}"
    if free < MIN_DISK:
        return problem(check, text, "free some space, or use another directory")
    if free < LOW_DISK:
        return warning(check, text, "free some space: checkpoints and models take several GiB")
    return ok(check, text)


def _model_cache() -> Path:
    """Return where Hugging Face models are stored; importing huggingface_hub would take long."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()


def check_files(limit: int) -> Finding:
    text = "no limit" if limit == resource.RLIM_INFINITY else f"at most {limit}"
    if limit == resource.RLIM_INFINITY or limit >= LOW_FILES:
        return ok("open files", text)
    make = problem if limit < MIN_FILES else warning
    return make("open files", text, "ulimit -n 65536, before the run is started")


def _check_loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError as error:
        return problem(
            "loopback",
            f"no connection to 127.0.0.1: {error}",
            "allow connections on the loopback interface; workers talk to each other there",
        )
    return ok("loopback", f"a free port was found ({port})")


def _check_sandbox(needed: bool) -> Finding:
    try:
        sandbox.check(allow_weak=False)
    except ConfigError as error:
        make = problem if needed else warning
        return make("sandbox", str(error), "see docs/sandbox.md; only code of models needs it")
    return ok("sandbox", "bubblewrap works")


def check_clock(now: float) -> Finding:
    """Compare the clock with the newest file of this package, which lies in the past."""
    newest = max(file.stat().st_mtime for file in Path(__file__).parent.glob("*.py"))
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < newest - 86400:
        return problem(
            "clock",
            f"{text}, but Paceline was installed later",
            "set the clock (timedatectl set-ntp true): downloads and trackers reject a wrong one",
        )
    return ok("clock", text)
