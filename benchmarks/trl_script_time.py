"""Time of the same GRPO script under TRL and under Paceline, on CPU.

    python benchmarks/trl_script_time.py [--quick] [--threads 2] [--python .venv-trl/bin/python]

Both run benchmarks/trl_script.py in the environment that benchmarks/install_trl.sh makes, with the
same model, data, reward functions and arguments; only the import differs. Runs are interleaved. The
results are medians over the rounds: the seconds of the whole script, imports included, the seconds
in `trainer.train()`, which for Paceline include importing torch, and the seconds of an update.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.models import bench_model  # noqa: E402
from benchmarks.report import RESULTS, command_line, origin, write  # noqa: E402

SCRIPT = ROOT / "benchmarks" / "trl_script.py"
NAMES = {"trl": "TRL GRPOTrainer", "paceline.trl": "paceline.trl"}
TIMES = {"script_s": "script s", "train_s": "train s", "step_s": "update s"}
Run = dict[str, Any]


def run_script(python: Path, library: str, model: str, threads: int, steps: int) -> Run:
    environment = {
        # Some virtual machines announce AMX without having it, and bfloat16 matmuls then crash.
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        # An installed package has bytecode. Without it, a run would compile the sources first.
        "PYTHONDONTWRITEBYTECODE": "",
    }
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        done = subprocess.run(
            [str(python), str(SCRIPT), library, model, f"{folder}/out", str(steps)],
            capture_output=True,
            text=True,
            env=environment,
        )
        seconds = time.perf_counter() - begun
    if done.returncode:
        sys.exit(f"{library} exited with code {done.returncode}:\n{done.stderr[-2000:]}")
    run: Run = json.loads(done.stdout.splitlines()[-1])
    return run | {"script_seconds": seconds}


def summarize(runs: dict[str, list[Run]], threads: int, steps: int) -> dict[str, Any]:
    found = {
        NAMES[library]: {
            "script_s": statistics.median(run["script_seconds"] for run in done),
            "train_s": statistics.median(run["seconds"] for run in done),
            "step_s": statistics.median(statistics.median(run["step_s"]) for run in done),
            "reward_first": statistics.median(run["reward"][0] for run in done),
            "reward_last": statistics.median(run["reward"][-1] for run in done),
            "rounds_script_s": [round(run["script_seconds"], 2) for run in done],
        }
        for library, done in runs.items()
    }
    trl, ours = (found[name] for name in NAMES.values())
    return origin() | {
        "work": f"{steps} updates on 32 completions of up to 64 tokens; 0.8M-parameter Qwen2 shape",
        "machine": f"{os.cpu_count()} cores, {threads} threads, {platform.machine()}, "
        f"load at the end {os.getloadavg()[0]:.1f}",
        "contenders": found,
        "ratios": {name: trl[name] / ours[name] for name in TIMES},
    }


def show(report: dict[str, Any]) -> None:
    heads = "".join(f"{head:>10}" for head in TIMES.values())
    print(f"\n{report['work']}\n{'':18}{heads}{'reward first, last':>21}")
    for name, row in report["contenders"].items():
        rewards = f"{row['reward_first']:.2f}, {row['reward_last']:.2f}"
        print(f"{name:18}" + "".join(f"{row[time]:10.2f}" for time in TIMES) + f"{rewards:>21}")
    print(f"{'TRL / Paceline':18}" + "".join(f"{r:9.2f}x" for r in report["ratios"].values()))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, nothing written")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-trl" / "bin" / "python")
    options = parser.parse_args()
    if not options.python.exists():
        sys.exit(
            f"--python = {options.python}: no such file; "
            "run benchmarks/install_trl.sh, or pass another path"
        )
    runs: dict[str, list[Run]] = {library: [] for library in NAMES}
    steps = 15 if options.quick else 100
    with tempfile.TemporaryDirectory() as folder:
        model = bench_model(Path(folder))
        for _ in range(1 if options.quick else 3):
            for library, done in runs.items():
                done.append(run_script(options.python, library, model, options.threads, steps))
    report = summarize(runs, options.threads, steps)
    show(report)
    if not options.quick:
        write(RESULTS / "trl_script.json", report)


if __name__ == "__main__":
    main()
