"""The benchmark of `./run_benchmark.sh [--quick]`: runs the cases, each in a separate process.

Writes benchmark_results_<time>/ with performance_report.md and its plots, summary.txt, results.json
and a log per case. If a case fails, the others still run. The exit code is 1 if a case failed or a
required criterion does not hold, 2 if an environment variable is invalid, and 0 otherwise. Skipped
cases do not change the exit code; the summary counts them.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.models import bench_model
from benchmarks.report import command_line, machine, write
from benchmarks.suite.cases import FULL, QUICK, Case, Work, all_cases, case_settings
from benchmarks.suite.choice import Choice, choice_from_environment, read_target
from benchmarks.suite.memory import Memory
from benchmarks.suite.outcome import check_case, check_rate, merge_rounds
from benchmarks.suite.report import outcome_line, report, summary
from paceline.errors import ConfigError
from paceline.model.loading import no_progress_bars

ROOT = Path(__file__).resolve().parents[2]
POLL_INTERVAL_S = 0.5

console = Console(soft_wrap=True, highlight=False)


def run_case(
    case: Case, settings: Sequence[str], work: Work, log: Path, scratch: Path
) -> dict[str, Any]:
    """Run one round of a case and return its metrics or the reason why there are none."""
    spec = {
        "name": case.name,
        "recipe": case.recipe,
        "settings": list(settings),
        "pause": case.pause,
    }
    (scratch / "spec.json").write_text(
        json.dumps(spec | {"median": work.median, "cap": work.cap, "warm_up": work.warm_up})
    )
    result = scratch / "result.json"
    result.unlink(missing_ok=True)
    command = [case.python, "-m", "benchmarks.suite.case", str(scratch / "spec.json"), str(result)]
    begun = time.monotonic()
    with log.open("a") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    memory = Memory(process.pid)
    try:
        while process.poll() is None and time.monotonic() - begun < work.limit_s:
            memory.poll()
            time.sleep(POLL_INTERVAL_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - begun
    if seconds >= work.limit_s:
        return {
            "state": "failed",
            "reason": f"did not end within {work.limit_s:g} s",
            "seconds": seconds,
        }
    if not result.exists():
        return {
            "state": "failed",
            "reason": f"the process exited with code {process.returncode}; see {log.name}",
            "seconds": seconds,
        }
    found: dict[str, Any] = json.loads(result.read_text()) | {"seconds": seconds}
    if found["state"] == "ok":
        metrics = found["metrics"]
        found["memory"] = memory.between(metrics["steady_from_s"], metrics["steady_to_s"])
    return found


def sweep(
    choice: Choice, work: Work, cases: Sequence[Case], directory: Path, show: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Run every case, round by round, so that a temporary disturbance affects all cases alike."""
    rounds: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
    runnable = [case for case in cases if not case.skip]
    total = len(runnable) * work.rounds
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[remaining]}"),
    )
    begun, done = time.monotonic(), 0
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch,
        Progress(*columns, console=console) as progress,
    ):
        with no_progress_bars():
            model = choice.model or bench_model(Path(scratch) / "model")
        bar = progress.add_task("", total=total, remaining="")
        for number in range(work.rounds):
            for case in runnable:
                progress.update(bar, description=case.name)
                run_dir = Path(scratch) / f"{case.file_name}-{number}"
                settings = [*case_settings(case, choice, work, model), f"run_dir={run_dir}"]
                outcome: dict[str, Any] = {
                    "state": "skipped",
                    "reason": f"the time budget of {work.budget_s / 60:.0f} minutes was used up",
                }
                if any(earlier["state"] == "failed" for earlier in rounds[case.name]):
                    outcome["reason"] = "failed in an earlier round"
                elif time.monotonic() - begun < work.budget_s:
                    log = directory / f"{case.file_name}.log"
                    outcome = run_case(case, settings, work, log, Path(scratch))
                rounds[case.name].append(outcome)
                done += 1
                left = (time.monotonic() - begun) / done * (total - done)
                shown = f"{left / 60:.0f} min" if left > 90 else f"{left:.0f} s"
                progress.update(bar, advance=1, remaining=f"about {shown} remaining")
                show(
                    f"[{done}/{total}] {case.name}: {outcome_line(outcome)}; "
                    f"about {left:.0f} s remaining"
                )
    merged = [merge_rounds(case, rounds[case.name]) for case in cases]
    for found in merged:
        if found["state"] == "ok":
            found["checks"] = [asdict(check) for check in check_case(found, work)]
    return merged


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer cases, smaller batches, one round: at most 5 minutes",
    )
    options = parser.parse_args()
    try:
        choice, target = choice_from_environment(), read_target(os.environ)
        if find_spec("matplotlib") is None:
            raise ConfigError("the plots need matplotlib: pip install matplotlib")
    except ConfigError as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        return 2
    # exit normally, so that the process of the current case is killed too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work = QUICK if options.quick else FULL
    cases = [case for case in all_cases(choice, work) if case.quick or not options.quick]
    directory = ROOT / time.strftime("benchmark_results_%Y%m%d_%H%M%S")
    directory.mkdir()
    console.print(f"{len(cases)} cases: {choice}; writing results to {directory.name}/")
    begun = time.monotonic()
    outcomes = sweep(choice, work, cases, directory, lambda text: console.print(text, markup=False))
    rate = check_rate(outcomes, target)
    gpus = f"{choice.gpus} GPU{'' if choice.gpus == 1 else 's'}"
    results = {
        "command": "./run_benchmark.sh" + (" --quick" if options.quick else ""),
        "date": time.strftime("%Y-%m-%d"),
        "choice": str(choice),
        "machine": f"{machine()}, {gpus}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "work": asdict(work),
        "minutes": (time.monotonic() - begun) / 60,
        "cases": outcomes,
        "rate": asdict(rate) if rate else None,
    }
    write(directory / "results.json", results)
    from benchmarks.suite.plots import draw_plots

    plots = draw_plots(results, directory)
    (directory / "performance_report.md").write_text(report(results, plots))
    text = summary(results)
    (directory / "summary.txt").write_text(text)
    console.print("\n" + text, markup=False)
    failed = any(case["state"] == "failed" for case in outcomes)
    checks = [check for case in outcomes for check in case["checks"]]
    checks += [asdict(rate)] if rate else []
    return 1 if failed or any(check["required"] and not check["ok"] for check in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
