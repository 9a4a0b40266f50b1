"""Runs the benchmark's cases one after the other, each in a process of its own: what `./run_benchmark.sh [--quick]` runs.

Leaves benchmark_results_<time>/ behind: performance_report.md with its plots, summary.txt, a log per case, results.json. A case that fails
is reported and the rest go on. The exit code is 0 when every case ran and every hard criterion holds.
"""

import argparse
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

from benchmarks.suite.cases import FULL, QUICK, Case, Work, all_cases, case_settings
from benchmarks.suite.choice import Choice, read_target, take
from benchmarks.suite.memory import Memory
from benchmarks.suite.outcome import judge, judge_rate, merged
from benchmarks.suite.report import line, report, summary
from benchmarks.models import bench_model
from paceline.data.tiny import no_progress_bars
from paceline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
POLL_INTERVAL_S = 0.5

console = Console(soft_wrap=True, highlight=False)


def run_case(
    case: Case, settings: Sequence[str], work: Work, log: Path, scratch: Path
) -> dict[str, Any]:
    """One round of a case: its figures, or why there are none."""
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
            memory.look()
            time.sleep(POLL_INTERVAL_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - begun
    if seconds >= work.limit_s:
        return {
            "state": "failed",
            "reason": f"not done within {work.limit_s:g} s",
            "seconds": seconds,
        }
    if not result.exists():
        return {
            "state": "failed",
            "reason": f"its process ended with {process.returncode}; see {log.name}",
            "seconds": seconds,
        }
    found: dict[str, Any] = json.loads(result.read_text()) | {"seconds": seconds}
    if found["state"] == "ok":
        found["memory"] = memory.between(
            found["figures"]["steady_from_s"], found["figures"]["steady_to_s"]
        )
    return found


def sweep(
    choice: Choice, work: Work, cases: Sequence[Case], folder: Path, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every case, round by round, so that what disturbs the machine for a while disturbs all cases alike."""
    rounds: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
    able = [case for case in cases if not case.skip]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    begun, done = time.monotonic(), 0
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch,
        Progress(*columns, console=console) as progress,
    ):
        with no_progress_bars():
            model = choice.model or bench_model(Path(scratch) / "model")
        bar = progress.add_task("", total=len(able) * work.rounds, left="")
        for number in range(work.rounds):
            for case in able:
                progress.update(bar, description=case.name)
                run_dir = Path(scratch) / f"{case.file_name}-{number}"
                settings = [*case_settings(case, choice, work, model), f"run_dir={run_dir}"]
                outcome: dict[str, Any] = {
                    "state": "skipped",
                    "reason": f"{work.budget_s / 60:.0f} minutes were up before its turn",
                }
                if any(earlier["state"] == "failed" for earlier in rounds[case.name]):
                    outcome["reason"] = "it has failed before"
                elif time.monotonic() - begun < work.budget_s:
                    outcome = run_case(
                        case, settings, work, folder / f"{case.file_name}.log", Path(scratch)
                    )
                rounds[case.name].append(outcome)
                done += 1
                left = (time.monotonic() - begun) / done * (len(able) * work.rounds - done)
                progress.update(
                    bar,
                    advance=1,
                    left=f"about {left / 60:.0f} min left"
                    if left > 90
                    else f"about {left:.0f} s left",
                )
                tell(
                    f"[{done}/{len(able) * work.rounds}] {case.name}: {_said(outcome)}; about {left:.0f} s left"
                )
    found = [merged(case, rounds[case.name]) for case in cases]
    for one in found:
        if one["state"] == "ok":
            one["verdicts"] = [asdict(verdict) for verdict in judge(one, work)]
    return found


def _said(found: dict[str, Any]) -> str:
    return (
        line(found["figures"])
        if found["state"] == "ok"
        else f"{found['state']}: {found['reason'].splitlines()[0]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer cases, small batches, one round: five minutes at most",
    )
    options = parser.parse_args()
    try:
        choice, target = take(), read_target(os.environ)
        if find_spec("matplotlib") is None:
            raise ConfigError(
                "the report's plots need matplotlib, which is not installed: pip install matplotlib"
            )
    except ConfigError as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        return 2
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that the case that runs is ended too
    work = QUICK if options.quick else FULL
    cases = [case for case in all_cases(choice, work) if case.quick or not options.quick]
    folder = ROOT / time.strftime("benchmark_results_%Y%m%d_%H%M%S")
    folder.mkdir()
    console.print(f"{len(cases)} cases: {choice}; results go to {folder.name}/")
    begun = time.monotonic()
    merges = sweep(choice, work, cases, folder, lambda text: console.print(text, markup=False))
    rate = judge_rate(merges, target)
    results = {
        "command": "./run_benchmark.sh" + (" --quick" if options.quick else ""),
        "choice": str(choice),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {choice.gpus} GPU{'' if choice.gpus == 1 else 's'}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "work": asdict(work),
        "minutes": (time.monotonic() - begun) / 60,
        "cases": merges,
        "rate": asdict(rate) if rate else None,
    }
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    from benchmarks.suite.plots import draw

    (folder / "performance_report.md").write_text(report(results, draw(results, folder)))
    text = summary(results)
    (folder / "summary.txt").write_text(text)
    console.print("\n" + text, markup=False)
    failed = any(case["state"] == "failed" for case in merges)
    verdicts = [verdict for case in merges for verdict in case["verdicts"]] + (
        [asdict(rate)] if rate else []
    )
    return 1 if failed or any(verdict["hard"] and not verdict["ok"] for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
