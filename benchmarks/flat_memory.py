"""Memory of a run whose producers are ten times faster than its trainer: it must not grow.

    python benchmarks/flat_memory.py [--minutes 10] [--warm-up 1]

A fully asynchronous run with the built-in model and real processes. Its first 600 steps are fast:
the heap of the controller reaches its size, as windows of metrics fill. Then the loss waits in the
trainer, so the queue is always full and the engine waits for tickets. The memory of each process
(anonymous and shared pages) is read every 2 seconds. Its slope is that of the least-squares line
after a warm-up of 1 minute more. How much faster the producers are is the time divided by the CPU
time of the engine's process, which does not depend on other programs.

Exit code 1 if a limit is missed; results in benchmarks/results/flat_memory.json.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.endurance import paced
from benchmarks.endurance.checks import Check, as_json, save, show
from benchmarks.report import circumstances, command_line

ROOT = Path(__file__).parents[1]
LIMIT = 1.0  # MB per minute
FASTER = 10.0  # producers, compared with the trainer
POLL_S = 2.0
LOSS_S = 3.0
FAST_STEPS = 600
Series = dict[str, list[tuple[float, float]]]  # seconds and MB, by process


def start(run_dir: Path, minutes: float) -> "subprocess.Popen[bytes]":
    pace = Path(paced.__file__)
    settings = [
        *(
            f"run_dir={run_dir}",
            f"steps={FAST_STEPS + int(minutes * 60 / LOSS_S) + 10}",
            "placement.threads=1",
        ),
        *(f"data.task={paced.TASK}", "schedule.max_staleness=4", "save_every=25"),
        *(f"algorithm.loss={pace}:loss", f"reward.function={pace}:reward"),
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", "train", "fully_async", *settings],
        cwd=ROOT,
        env=os.environ
        | {paced.LOSS_S: str(LOSS_S), paced.FAST_LOSSES: str(FAST_STEPS), "PYTHONPATH": str(ROOT)},
        stdout=(run_dir.parent / "output.txt").open("wb"),
        stderr=subprocess.STDOUT,
    )


def poll(
    root: psutil.Process,
    run_dir: Path,
    at: float,
    series: Series,
    engine: list[tuple[float, float]],
) -> None:
    """Record memory by process, and the CPU time of the engine."""
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        try:
            name, size = name_of(process, root, run_dir), resident_mb(process.pid)
            series[f"{name} {process.pid}"].append((at, size))
            if name == "rollout":
                engine.append((at, sum(process.cpu_times()[:2])))
            total += size
        except (psutil.Error, OSError):
            continue
    series["all processes"].append((at, total))


def resident_mb(pid: int) -> float:
    """Return anonymous and shared memory. Pages of files depend on other processes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kb = [int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))]
    return sum(kb) / 1024


def name_of(process: psutil.Process, root: psutil.Process, run_dir: Path) -> str:
    if process.pid == root.pid:
        return "controller"
    output = Path(os.path.realpath(f"/proc/{process.pid}/fd/1"))
    if output.parent == (run_dir / "logs").resolve():
        return output.stem
    return "reward" if "paceline.reward.worker" in " ".join(process.cmdline()) else "other"


def slope(points: list[tuple[float, float]]) -> float:
    """Return MB per minute."""
    seconds, sizes = np.array(points).T
    return float(np.polyfit(seconds / 60, sizes, 1)[0])


def measure(minutes: float, warm_up: float, folder: Path) -> tuple[Series, dict[str, float]]:
    run_dir = folder / "run"
    series: Series = defaultdict(list)
    engine: list[tuple[float, float]] = []
    metrics = run_dir / "metrics.jsonl"
    run = start(run_dir, minutes)
    try:
        begun: float | None = None
        root = psutil.Process(run.pid)
        while run.poll() is None:
            if begun is None and metrics.exists() and _lines(metrics) >= FAST_STEPS:
                begun = time.monotonic()
            if begun is not None and (at := time.monotonic() - begun) <= minutes * 60:
                poll(root, run_dir, at, series, engine)
            time.sleep(POLL_S)
    finally:
        run.kill()
        run.wait()
    if run.returncode:
        sys.exit((folder / "output.txt").read_text()[-4000:])
    summary = json.loads((run_dir / "summary.json").read_text())
    (begin, cpu), (finish, cpu_end) = engine[0], engine[-1]
    summary["times_faster"] = (finish - begin) / (cpu_end - cpu)
    warm = {
        name: [point for point in points if point[0] >= warm_up * 60]
        for name, points in series.items()
    }
    enough = (minutes - warm_up) * 60 / POLL_S / 2  # without processes that existed for a moment
    return {name: points for name, points in warm.items() if len(points) >= enough}, summary


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--warm-up", type=float, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        series, summary = measure(args.minutes, args.warm_up, Path(folder))
    checks = [
        Check(f"MB per minute: {name}", slope(points), "<=", LIMIT)
        for name, points in series.items()
    ]
    checks += [
        Check("producers faster than trainer, times", summary["times_faster"], ">=", FASTER),
        Check("queue utilization, mean", summary["queue_utilization"]),
        Check("train steps", summary["steps"]),
        Check("MB at the end", series["all processes"][-1][1]),
    ]
    good = show(f"{args.minutes:g} minutes of producers that are faster than the trainer", checks)
    curve = [round(size, 2) for _, size in series["all processes"][:: int(30 / POLL_S)]]
    save("flat_memory.json", circumstances() | {"checks": as_json(checks), "mb_every_30_s": curve})
    sys.exit(not good)


if __name__ == "__main__":
    main()
