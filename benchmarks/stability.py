"""Stability of learning: which settings let the reward fall, and whether the recipes hold it.

    python benchmarks/stability.py ablation   # one setting at a time, 200 steps: about 20 minutes
    python benchmarks/stability.py recipes    # the recipes of the README: about 8 minutes
    python benchmarks/stability.py long       # the demo with 3,000 steps: about 12 minutes

Every case runs with three seeds, on a CPU. A case is measured by means of 25 steps: `end` is the
last one, `best` the largest, `fall` the largest difference of one to the best before it.

Each command updates its part of benchmarks/results/stability.json and the plot
docs/images/stability.svg. Needs matplotlib (extra `bench`).
"""

import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
import paceline.run
from benchmarks.report import RESULTS, command_line, origin, read_metrics
from paceline.config import load_config
from paceline.errors import PacelineError

ROOT = Path(__file__).resolve().parents[1]
FILE = RESULTS / "stability.json"
PLOT = ROOT / "docs" / "images" / "stability.svg"
SEEDS: tuple[int, ...] = (0, 1, 2)
WINDOW = 25  # steps of a mean: single batches of 16 prompts vary by 0.04

SORT = ("fully_async", "data.task=sort:5", "steps=200", "schedule.max_staleness=4")
BEFORE = (
    "train.learning_rate=4e-4",
    "train.betas=[0.9,0.999]",
    "train.staleness_kl_target=0",
)
Case = tuple[str, ...]  # recipe and overrides
ABLATION: dict[str, Case] = {
    "before": (*SORT, *BEFORE),
    "staleness 0 (hybrid)": ("hybrid", *SORT[1:3], *BEFORE),
    "betas 0.9, 0.95": (*SORT, *BEFORE, "train.betas=[0.9,0.95]"),
    "learning rate 2e-4": (*SORT, *BEFORE, "train.learning_rate=2e-4"),
    "learning rate 1e-4": (*SORT, *BEFORE, "train.learning_rate=1e-4"),
    "KL target 0.01": (*SORT, *BEFORE, "train.staleness_kl_target=0.01"),
    "KL target 0.003": (*SORT, *BEFORE, "train.staleness_kl_target=0.003"),
    "linear decay": (*SORT, *BEFORE, "train.lr_schedule=linear"),
    "gradient norm 0.2": (*SORT, *BEFORE, "train.max_grad_norm=0.2"),
    "clip 0.1": (*SORT, *BEFORE, "algorithm.clip_low=0.1", "algorithm.clip_high=0.1"),
    "dual clip 2": (*SORT, *BEFORE, "algorithm.dual_clip=2"),
    "no division by std": (*SORT, *BEFORE, "algorithm.normalize=none"),
    "KL to reference 0.02": (*SORT, *BEFORE, "algorithm.kl_coef=0.02"),
    "correction truncate": (*SORT, *BEFORE, "algorithm.correction=truncate"),
    "correction m2po": (*SORT, *BEFORE, "algorithm.correction=m2po"),
    "2e-4, betas 0.9, 0.95": (*SORT, "train.staleness_kl_target=0"),
    "the same, dual clip 2": (*SORT, "train.staleness_kl_target=0", "algorithm.dual_clip=2"),
    "recipe": SORT,
}
RECIPES: dict[str, Case] = {
    "hybrid": ("hybrid",),
    "split": ("split",),
    "one_step_off": ("one_step_off",),
    "fully_async": ("fully_async",),
    "one_gpu_async": ("one_gpu_async",),
    "fully_async, sort:5, staleness 4": SORT,
}
LONG: dict[str, Case] = {"demo": ("fully_async", "steps=3000")}
COMMANDS = {"ablation": ABLATION, "recipes": RECIPES, "long": LONG}


def learn(case: Case, seed: int, run_dir: Path) -> dict[str, Any]:
    """Return the results of a run; an error of the run and its warnings are part of them."""
    recipe, *settings = case
    settings += [f"seed={seed}", f"run_dir={run_dir}", "save_every=0", "save_samples=0"]
    error = None
    try:
        asyncio.run(paceline.run.train(load_config(recipe, settings)))
    except PacelineError as found:
        error = str(found)
    rows = read_metrics(run_dir)
    log = (run_dir / "logs" / "main.log").read_text().splitlines()
    means = smooth([row["reward/mean"] for row in rows])
    best, fall = means[0], 0.0
    for mean in means:
        best = max(best, mean)
        fall = max(fall, best - mean)
    kl = [row["train/staleness_kl"] for row in rows if row.get("train/staleness_kl") is not None]
    return {
        "steps": len(rows),
        "end": round(means[-1], 4),
        "best": round(best, 4),
        "fall": round(fall, 4),
        "staleness_kl": round(statistics.fmean(kl), 5) if kl else 0.0,
        "error": error,
        "collapse": next((line for line in log if "policy collapsed" in line), None),
        # Of every fifth step, for the plot.
        "curve": [round(mean, 3) for mean in means[::5]],
    }


def smooth(rewards: list[float]) -> list[float]:
    """Return the means of WINDOW consecutive steps."""
    return [statistics.fmean(rewards[i : i + WINDOW]) for i in range(len(rewards) - WINDOW + 1)]


def measure(cases: dict[str, Case], seeds: tuple[int, ...]) -> dict[str, Any]:
    begin, runs = time.perf_counter(), {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, case) in enumerate(cases.items()):
            runs[name] = [learn(case, seed, Path(scratch) / f"{number}-{seed}") for seed in seeds]
            print(name, *((run["end"], run["best"], run["fall"]) for run in runs[name]), flush=True)
    return origin() | {
        "machine": f"{torch.get_num_threads()} cores, {platform.machine()}; "
        f"torch {torch.__version__}",
        "minutes": round((time.perf_counter() - begin) / 60, 1),
        "settings": {name: " ".join(case) for name, case in cases.items()},
        "runs": runs,
    }


def show(title: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    table = Table(title=f"{title}: means of {WINDOW} steps, one value per seed")
    for column in ("case", "end", "best - end", "largest fall", "KL of stale tokens"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for name, found in runs.items():
        columns = (
            [f"{run['end']:.2f}" for run in found],
            [f"{run['best'] - run['end']:.3f}" for run in found],
            [f"{run['fall']:.3f}" for run in found],
            [f"{statistics.fmean(run['staleness_kl'] for run in found):.4f}"],
        )
        table.add_row(name, *(" ".join(column) for column in columns))
    Console(width=130).print(table)


def plot(report: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "paceline"
    from matplotlib import pyplot

    shown = {
        "ablation": (
            "sort:5, staleness 4",
            ("before", "correction truncate", "recipe"),
        ),
        "recipes": ("recipes", tuple(RECIPES)),
        "long": ("demo, 3,000 steps", tuple(LONG)),
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), sharey=True)
    for axis, (command, (title, names)) in zip(axes, shown.items(), strict=True):
        for number, name in enumerate(names):
            for seed, run in enumerate(report.get(command, {}).get("runs", {}).get(name, ())):
                steps = [WINDOW + 5 * i for i in range(len(run["curve"]))]
                label = name if seed == 0 else None
                axis.plot(steps, run["curve"], color=f"C{number}", linewidth=1.1, label=label)
        axis.set(xlabel="train step", title=title, ylim=(0, 1.02))
        if axis.lines:
            axis.legend(fontsize=7, loc="lower right")
    axes[0].set_ylabel(f"reward, mean of {WINDOW} steps")
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None})


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--quick", action="store_true", help="one seed, 30 steps, no files")
    options = parser.parse_args()
    cases, seeds = COMMANDS[options.command], SEEDS
    if options.quick:
        cases, seeds = {name: (*case, "steps=30") for name, case in cases.items()}, SEEDS[:1]
    part = measure(cases, seeds)
    show(options.command, part["runs"])
    if not options.quick:
        report = json.loads(FILE.read_text()) if FILE.exists() else {}
        report[options.command] = part
        FILE.write_text(json.dumps(report) + "\n")
        plot(report)


if __name__ == "__main__":
    main()
