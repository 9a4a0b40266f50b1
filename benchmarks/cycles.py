"""Runs that are started and stopped again and again in one process: nothing may be left.

    python benchmarks/cycles.py [--count 500] [--processes-every 50]

Each cycle is `paceline.train` with the built-in model and one step: it loads the model, starts the
workers and a reward process, trains, saves a checkpoint and ends. Cycles alternate between a hybrid
run and an overlapping asynchronous one, whose workers are threads. Every 50th has worker processes,
with weights in shared memory or over TCP. Processes, threads, descriptors, listening sockets,
shared memory and temporary files are counted after a warm-up and at the end. So are the bytes that
the C library has given out and not got back, without Python's small objects. Resident memory, which
has no limit here, also has free gaps between them, which grow for some dozens of cycles without a
leak.

Exit code 1 if a limit is missed; results in benchmarks/results/cycles.json.
"""

import ctypes
import gc
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paceline

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.endurance import paced
from benchmarks.endurance.checks import Check, as_json, save, show
from benchmarks.endurance.leftovers import Leftovers, descriptors, listening_sockets
from benchmarks.report import circumstances, command_line

WARM_UP = 4  # cycles: pools of threads and caches reach their size
LEAK_MB = 1.0  # per 100 cycles
SETTLE_S = 10.0  # for threads of the last cycle to end
SETTINGS: dict[str, Any] = {
    "rollout.max_response_length": 4,
    "reward.function": f"{paced.__file__}:reward",
    "reward.workers": 1,
    "placement.threads": 1,
}
POOLS = {"placement.actor": "train", "placement.rollout": "rollout", "schedule.on_sync": "swap"}
IN_THREADS: tuple[dict[str, Any], ...] = (
    {},
    {"placement.overlap": True, "schedule.max_staleness": 1, "schedule.on_sync": "swap"},
)
IN_PROCESSES: tuple[dict[str, Any], ...] = (
    {**POOLS, "schedule.max_staleness": 1},
    {**POOLS, "schedule.max_staleness": 1, "sync.transport": "stream"},
)


def cycle(run_dir: Path, settings: Mapping[str, Any], model: str = "tiny") -> None:
    """Train one step in a new run directory, and delete it."""
    paceline.train(
        model=model,
        steps=1,
        groups_per_step=2,
        group_size=2,
        run_dir=str(run_dir),
        data={"task": paced.TASK, "max_prompt_length": 32},
        display=False,
        **SETTINGS,
        **settings,
    )
    shutil.rmtree(run_dir)


def census(leftovers: Leftovers, run_dir: Path) -> dict[str, int]:
    """Count what this process and its descendants have."""
    found = {kind: len(names) for kind, names in leftovers.find(run_dir).items()}
    del found["unfinished checkpoints"]  # of a directory that is deleted
    found |= {f"descriptors: {kind}": count for kind, count in descriptors().items()}
    return found | {"threads": threading.active_count(), "listening sockets": listening_sockets()}


@contextmanager
def isolated(folder: Path) -> Iterator[Leftovers]:
    """Mark all processes and temporary files that are started from here."""
    leftovers = Leftovers(folder)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    changed = {name: os.environ.get(name) for name in leftovers.environment}
    os.environ |= leftovers.environment
    try:
        yield leftovers
    finally:
        tempfile.tempdir = before
        for name, value in changed.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_cycles(
    count: int, processes_every: int, folder: Path, model: str = "tiny"
) -> tuple[dict[str, int], list[float], tuple[float, float]]:
    """Return the growth of each count, the seconds of each cycle, and the growth in MB of resident
    memory and of the bytes in use."""
    temporary, run_dir = folder / "tmp", folder / "run"
    temporary.mkdir()
    seconds = []
    with isolated(temporary) as leftovers:
        for number in range(WARM_UP):
            cycle(run_dir, IN_THREADS[number % 2], model)
        if processes_every:
            cycle(run_dir, IN_PROCESSES[0], model)
        before, memory, used = census(leftovers, run_dir), _resident_mb(), _used_mb()
        for number in range(1, count + 1):
            begun = time.perf_counter()
            settings = IN_THREADS[number % 2]
            if processes_every and number % processes_every == 0:
                settings = IN_PROCESSES[number // processes_every % 2]
            cycle(run_dir, settings, model)
            seconds.append(time.perf_counter() - begun)
            if number % 50 == 0:
                print(f"{number} cycles, {_resident_mb() - memory:+.1f} MB", flush=True)
        growth = _settled(before, leftovers, run_dir)
        return growth, seconds, (_resident_mb() - memory, _used_mb() - used)


def _settled(before: Mapping[str, int], leftovers: Leftovers, run_dir: Path) -> dict[str, int]:
    deadline = time.monotonic() + SETTLE_S
    while True:
        gc.collect()
        after = census(leftovers, run_dir)
        growth = {kind: after[kind] - before.get(kind, 0) for kind in after}
        if max(growth.values()) <= 0 or time.monotonic() > deadline:
            return growth
        time.sleep(0.1)


def _resident_mb() -> float:
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


class _Mallinfo(ctypes.Structure):
    _fields_ = [("values", ctypes.c_size_t * 10)]


def _used_mb() -> float:
    """Return what all threads have allocated and not freed, as the C library counts it."""
    gc.collect()
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Mallinfo
    values = ask().values
    mapped, used = values[4], values[7]
    return float(mapped + used) / 1e6


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--processes-every", type=int, default=50, help="0: never")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        growth, seconds, (memory, used) = run_cycles(args.count, args.processes_every, Path(folder))
    checks = [Check(f"growth: {kind}", more, "<=", 0) for kind, more in growth.items()]
    checks += [
        Check("cycles", len(seconds)),
        Check("seconds per cycle, median", statistics.median(seconds)),
        Check(
            "growth of bytes in use, MB per 100 cycles", 100 * used / len(seconds), "<=", LEAK_MB
        ),
        Check("growth of resident memory, MB per 100 cycles", 100 * memory / len(seconds)),
    ]
    good = show(f"{args.count} runs started and stopped in one process", checks)
    save("cycles.json", circumstances() | {"checks": as_json(checks)})
    sys.exit(not good)


if __name__ == "__main__":
    main()
