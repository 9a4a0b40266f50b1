"""Time of a GRPO step on CPU: Paceline and TRL with the same work.

    python benchmarks/vs_trl.py [--quick] [--threads 2] [--trl-python .venv-trl/bin/python]

8 prompts x 8 completions of up to 64 tokens, 0.8M-parameter Qwen2 shape. The TRL interpreter is
created by benchmarks/install_trl.sh. Both sides have the same float32 weights, tokenizer, prompts,
reward, token limit and end-of-sequence token. Both make one optimizer update per batch, without an
extra pass for log-probs (TRL uses those of the training pass, Paceline those of the engine), a
reference model or checkpoints. TRL's defaults train with bfloat16 matmuls; tuned for speed it uses
float32, because bfloat16 is slower there. Paceline is measured with both.

Contenders run interleaved; the result is the median over the rounds of the median step in steady
state. The tokens generated per step show that the work is the same. CPU seconds give the cost of a
step on a busy machine; with `--threads 1` they equal the time of a step on an idle one.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.idle import wait_idle  # noqa: E402
from benchmarks.models import bench_model  # noqa: E402
from benchmarks.report import RESULTS, command_line, origin, read_metrics, write  # noqa: E402
from paceline.config import load_config  # noqa: E402
from paceline.loop import Metrics  # noqa: E402
from paceline.rollout.engine import EngineStats  # noqa: E402
from paceline.run import train  # noqa: E402
from paceline.types import Group  # noqa: E402

WORKER = ROOT / "benchmarks" / "trl_worker.py"
GROUPS, GROUP_SIZE, NEW_TOKENS, WARM_UP = 8, 8, 64, 4
SYNC, ASYNC = "Paceline, hybrid sync", "Paceline, fully async"
FLOAT32, BFLOAT16 = "float32", "bfloat16"
MODES = {
    SYNC: ["schedule.max_staleness=0"],
    ASYNC: [
        "placement.actor=train",
        "placement.rollout=rollout",
        "schedule.max_staleness=2",
        "schedule.on_sync=swap",
    ],
}
TRL, DEFAULTS = "TRL GRPOTrainer, tuned, float32", "TRL GRPOTrainer, default, bfloat16"
Run = dict[str, Any]  # seconds and tokens of every step after the warm-up, and more


def write_prompts(path: Path) -> None:
    """Write prompts of 16 tokens: a start token and one token per character."""
    digits = random.Random(0)
    rows = ["reverse " + "".join(digits.choices("0123456789", k=7)) for _ in range(1024)]
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))


class Clock:
    """Observer that records wall clock and CPU time at the end of every step."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def step_done(self, step: int, metrics: Metrics, groups: Sequence[Group]) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def engines_polled(self, engines: Sequence[EngineStats], queue_utilization: float) -> None:
        pass


def run_paceline(directory: Path, name: str, settings: list[str], steps: int) -> Run:
    run_dir, clock = directory / name, Clock()
    common = [
        f"model={directory / 'model'}",
        f"run_dir={run_dir}",
        f"steps={steps}",
        f"groups_per_step={GROUPS}",
        f"group_size={GROUP_SIZE}",
        f"data.path={directory / 'prompts.jsonl'}",
        "data.max_prompt_length=16",
        f"rollout.max_response_length={NEW_TOKENS}",
        f"rollout.slots={GROUPS * GROUP_SIZE}",
        f"reward.function={WORKER}:reward",
        "train.learning_rate=1e-6",
        "save_every=0",
    ]
    summary = asyncio.run(train(load_config(None, [*common, *settings]), lambda first_step: clock))
    rows = read_metrics(run_dir)
    steady = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(clock.ends)][
        WARM_UP:
    ]
    return {
        "seconds": [wall for wall, _ in steady],
        "tokens": [row["rollout/tokens"] for row in rows][WARM_UP + 1 :],
        "train_s": statistics.median(row["train/busy_s"] for row in rows[WARM_UP + 1 :]),
        "staleness_max": summary["staleness_max"],
    } | ({"cpu_s": [cpu for _, cpu in steady]} if name.startswith(SYNC) else {})  # one process


def run_trl(python: Path, directory: Path, steps: int, threads: int, tuned: bool) -> Run:
    job = {
        "model": str(directory / "model"),
        "prompts": str(directory / "prompts.jsonl"),
        "directory": str(directory / "trl"),
        "steps": steps,
        "groups": GROUPS,
        "group_size": GROUP_SIZE,
        "new_tokens": NEW_TOKENS,
        "threads": threads,
        "tuned": tuned,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    found = subprocess.run(
        [str(python), str(WORKER), json.dumps(job)], capture_output=True, text=True, env=environment
    )
    if found.returncode:
        sys.exit(f"TRL exited with code {found.returncode}:\n{found.stderr[-2000:]}")
    run: Run = json.loads(found.stdout)
    return run | {name: run[name][WARM_UP:] for name in ("seconds", "cpu_s", "tokens")}


def measure(options: argparse.Namespace, directory: Path) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {}
    steps = WARM_UP + (8 if options.quick else 16)
    modes = {}
    for dtype in (FLOAT32, BFLOAT16):
        modes[f"{SYNC}, {dtype}"] = [
            *MODES[SYNC],
            f"train.dtype={dtype}",
            f"placement.threads={options.threads}",
        ]
        if options.threads > 1:
            modes[f"{ASYNC}, {dtype}"] = [
                *MODES[ASYNC],
                f"train.dtype={dtype}",
                f"placement.threads={options.threads // 2}",
            ]
    for number in range(1 if options.quick else 3):
        for name, settings in modes.items():
            wait_idle(20.0)
            runs.setdefault(name, []).append(
                run_paceline(directory, f"{name}-{number}", settings, steps)
            )
        for name, tuned in ((TRL, True), (DEFAULTS, False)):
            wait_idle(20.0)
            runs.setdefault(name, []).append(
                run_trl(options.trl_python, directory, steps, options.threads, tuned)
            )
    return runs


def summarize(runs: dict[str, list[Run]], threads: int) -> dict[str, Any]:
    contenders = {
        name: {
            "step_s": statistics.median(statistics.median(run["seconds"]) for run in found),
            "cpu_s": statistics.median(statistics.median(run["cpu_s"]) for run in found)
            if "cpu_s" in found[0]
            else None,
            "step_s_best_round": min(statistics.median(run["seconds"]) for run in found),
            "tokens_per_step": statistics.mean(tokens for run in found for tokens in run["tokens"]),
            "rounds_step_s": [round(statistics.median(run["seconds"]), 4) for run in found],
        }
        | {
            key: statistics.median(run[key] for run in found)
            for key in ("train_s", "staleness_max")
            if key in found[0]
        }
        for name, found in runs.items()
    }
    for metrics in contenders.values():
        cpu = metrics["cpu_s"]
        metrics["cpu_time_ratio"] = contenders[TRL]["cpu_s"] / cpu if cpu else None
        metrics["times_faster_than_trl_tuned"] = contenders[TRL]["step_s"] / metrics["step_s"]
        metrics["times_faster_than_trl_defaults"] = (
            contenders[DEFAULTS]["step_s"] / metrics["step_s"]
        )
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return origin() | {
        "work": f"{GROUPS} prompts x {GROUP_SIZE} completions of up to {NEW_TOKENS} tokens, "
        "one update; 0.8M-parameter Qwen2 shape",
        "machine": f"{os.cpu_count()} cores, {threads} threads, {platform.machine()}, "
        f"load at the end {os.getloadavg()[0]:.1f}",
        "versions": {"paceline side": versions, "trl side": runs[TRL][0]["versions"]},
        "contenders": contenders,
    }


def show(report: dict[str, Any]) -> None:
    table = Table(title=report["work"])
    for column in (
        "contender",
        "step s",
        "steps/s",
        "vs. TRL tuned",
        "vs. TRL defaults",
        "best round s",
        "CPU s",
        "tokens/step",
    ):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for name, f in report["contenders"].items():
        cpu = f"{f['cpu_s']:.3f} ({f['cpu_time_ratio']:.2f}x)" if f["cpu_s"] else ""
        table.add_row(
            name,
            f"{f['step_s']:.3f}",
            f"{1 / f['step_s']:.2f}",
            f"{f['times_faster_than_trl_tuned']:.2f}x",
            f"{f['times_faster_than_trl_defaults']:.2f}x",
            f"{f['step_s_best_round']:.3f}",
            cpu,
            f"{f['tokens_per_step']:.0f}",
        )
    Console(width=130).print(table)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, nothing written")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv-trl" / "bin" / "python")
    options = parser.parse_args()
    if not options.trl_python.exists():
        sys.exit(
            f"--trl-python = {options.trl_python}: no such file; "
            "run benchmarks/install_trl.sh, or pass another path"
        )
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        bench_model(directory / "model")
        write_prompts(directory / "prompts.jsonl")
        runs = measure(options, directory)
    report = summarize(runs, options.threads)
    show(report)
    if not options.quick:
        write(RESULTS / "vs_trl.json", report)


if __name__ == "__main__":
    main()
