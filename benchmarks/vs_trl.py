"""One GRPO step, 8 prompts x 8 answers of up to 64 tokens, 0.8M-parameter Qwen2 shape, on CPU: Paceline against TRL.

    python benchmarks/vs_trl.py [--quick] [--threads 2] [--trl-python .venv-trl/bin/python]

The TRL interpreter is made by benchmarks/install_trl.sh. Both sides get the same weights, tokenizer, prompts, reward, token limit
and end-of-answer token, float32 weights, one optimizer update per batch, no extra pass for log-probs (TRL takes the training pass's
own, Paceline the engine's), no reference model, no checkpoints between steps. TRL as it comes trains with bfloat16 products; set up
for speed it uses float32, since bfloat16 slows it here. Paceline is shown with both. Contenders take turns; the figure is the median over
the rounds of the median step in steady state. Tokens generated per step are printed to show that the work is the same.
Processor seconds say what a step costs when others use the machine too; with `--threads 1` they are what it would take alone.
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

import psutil
import torch
import transformers
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.models import bench_model  # noqa: E402
from paceline.config import load_config  # noqa: E402
from paceline.loop import Metrics  # noqa: E402
from paceline.rollout.engine import EngineStats  # noqa: E402
from paceline.run import train  # noqa: E402
from paceline.types import Group  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "vs_trl.json"
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
TRL, DEFAULTS = "TRL GRPOTrainer, tuned, float32", "TRL GRPOTrainer, its defaults, bfloat16"
Run = dict[str, Any]  # seconds and tokens of every step after the warm-up, and what else is known


def write_prompts(path: Path) -> None:
    """16 tokens each, one per character and one to begin."""
    digits = random.Random(0)
    rows = ["reverse " + "".join(digits.choices("0123456789", k=7)) for _ in range(1024)]
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))


class Clock:
    """An observer of the loop that notes wall clock and processor time at the end of every step."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def step_done(self, step: int, metrics: Metrics, groups: Sequence[Group]) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def engines_polled(self, engines: Sequence[EngineStats], queue_utilization: float) -> None:
        pass


def run_paceline(folder: Path, name: str, settings: list[str], steps: int) -> Run:
    run_dir, clock = folder / name, Clock()
    common = [
        f"model={folder / 'model'}", f"run_dir={run_dir}", f"steps={steps}", f"groups_per_step={GROUPS}", f"group_size={GROUP_SIZE}",
        f"data.path={folder / 'prompts.jsonl'}", "data.max_prompt_length=16", f"rollout.max_response_length={NEW_TOKENS}",
        f"rollout.slots={GROUPS * GROUP_SIZE}", f"reward.function={WORKER}:reward", "train.learning_rate=1e-6", "save_every=0",
    ]  # fmt: skip
    summary = asyncio.run(train(load_config(None, [*common, *settings]), lambda first_step: clock))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steady = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(clock.ends)][
        WARM_UP:
    ]
    return {
        "seconds": [wall for wall, _ in steady],
        "tokens": [row["rollout/tokens"] for row in rows][WARM_UP + 1 :],
        "train_s": statistics.median(row["train/busy_s"] for row in rows[WARM_UP + 1 :]),
        "staleness_max": summary["staleness_max"],
    } | (
        {"processor_s": [processor for _, processor in steady]} if name.startswith(SYNC) else {}
    )  # all in this process


def run_trl(python: Path, folder: Path, steps: int, threads: int, tuned: bool) -> Run:
    job = {
        "model": str(folder / "model"), "prompts": str(folder / "prompts.jsonl"), "folder": str(folder / "trl"), "steps": steps,
        "groups": GROUPS, "group_size": GROUP_SIZE, "new_tokens": NEW_TOKENS, "threads": threads, "tuned": tuned,
    }  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    found = subprocess.run(
        [str(python), str(WORKER), json.dumps(job)], capture_output=True, text=True, env=environment
    )
    if found.returncode:
        sys.exit(f"TRL ended with code {found.returncode}:\n{found.stderr[-2000:]}")
    run: Run = json.loads(found.stdout)
    return run | {name: run[name][WARM_UP:] for name in ("seconds", "processor_s", "tokens")}


def wait_idle(limit_s: float = 20.0) -> None:
    """Wait, but not for ever, until the machine is quiet: two threads that take turns with others measure the others."""
    ends = time.monotonic() + limit_s
    while psutil.cpu_percent(0.5) > 15 and time.monotonic() < ends:
        pass


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[Run]]:
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
    for turn in range(1 if options.quick else 3):
        for name, settings in modes.items():
            wait_idle()
            runs.setdefault(name, []).append(
                run_paceline(folder, f"{name}-{turn}", settings, steps)
            )
        for name, tuned in ((TRL, True), (DEFAULTS, False)):
            wait_idle()
            runs.setdefault(name, []).append(
                run_trl(options.trl_python, folder, steps, options.threads, tuned)
            )
    return runs


def summarize(runs: dict[str, list[Run]], command: str, threads: int) -> dict[str, Any]:
    contenders = {
        name: {
            "step_s": statistics.median(statistics.median(run["seconds"]) for run in found),
            "processor_s": statistics.median(statistics.median(run["processor_s"]) for run in found)
            if "processor_s" in found[0]
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
    for figures in contenders.values():
        processor = figures["processor_s"]
        figures["times_less_processor_time"] = (
            contenders[TRL]["processor_s"] / processor if processor else None
        )
        figures["times_faster_than_trl_tuned"] = contenders[TRL]["step_s"] / figures["step_s"]
        figures["times_faster_than_trl_defaults"] = (
            contenders[DEFAULTS]["step_s"] / figures["step_s"]
        )
    own = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return {
        "command": command,
        "work": f"{GROUPS} prompts x {GROUP_SIZE} answers of up to {NEW_TOKENS} tokens, one update; 0.8M-parameter Qwen2 shape",
        "machine": f"{os.cpu_count()} cores, {threads} threads, {platform.machine()}, load at the end {os.getloadavg()[0]:.1f}",
        "versions": {"paceline side": own, "trl side": runs[TRL][0]["versions"]},
        "contenders": contenders,
    }


def show(report: dict[str, Any]) -> None:
    table = Table(title=report["work"])
    for column in (
        "contender",
        "step s",
        "steps/s",
        "against TRL tuned",
        "against its defaults",
        "best round s",
        "processor s",
        "tokens/step",
    ):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for name, f in report["contenders"].items():
        processor = (
            f"{f['processor_s']:.3f} ({f['times_less_processor_time']:.2f}x)"
            if f["processor_s"]
            else ""
        )
        table.add_row(
            name, f"{f['step_s']:.3f}", f"{1 / f['step_s']:.2f}", f"{f['times_faster_than_trl_tuned']:.2f}x",
            f"{f['times_faster_than_trl_defaults']:.2f}x", f"{f['step_s_best_round']:.3f}", processor, f"{f['tokens_per_step']:.0f}",
        )  # fmt: skip
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short round, nothing written")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv-trl" / "bin" / "python")
    options = parser.parse_args()
    if not options.trl_python.exists():
        sys.exit(
            f"{options.trl_python} does not exist: run benchmarks/install_trl.sh first, or pass --trl-python"
        )
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        bench_model(folder / "model")
        write_prompts(folder / "prompts.jsonl")
        runs = measure(options, folder)
    report = summarize(runs, " ".join(["python", *sys.argv]), options.threads)
    show(report)
    if not options.quick:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
