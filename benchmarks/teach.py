"""Held-out accuracy of a real model by training time, in several modes and with several seeds.

    python benchmarks/teach.py gsm8k --model FOLDER --train train.jsonl --test test.jsonl
    python benchmarks/teach.py gsm8k_sft --model FOLDER --train train.jsonl --test test.jsonl
    python benchmarks/teach.py sums --model FOLDER [--steps 100] [--seeds 0,1,2] [--modes hybrid]
    python benchmarks/teach.py reasoning_gym --model FOLDER --train train.jsonl --test test.jsonl
    python benchmarks/teach.py countdown --model FOLDER
    python benchmarks/teach.py tools --model FOLDER

Each run evaluates the first version, every few steps and the last one on all held-out rows (greedy,
one completion each). Time counts from the start of the first evaluation, after the model has been
loaded, and includes all evaluations. No checkpoint is written. gsm8k_sft fine-tunes the model on
the answers of the data set first, once for all runs. reasoning_gym_rows.py writes the files of
reasoning_gym. Writes benchmarks/results/teach_TASK.json and, if matplotlib is installed,
docs/images/teach_TASK.svg.
"""

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import paceline  # noqa: E402
import paceline.run  # noqa: E402
from benchmarks.gpu_loop import no_checkpoint  # noqa: E402
from benchmarks.report import RESULTS, command_line, device, origin, write  # noqa: E402
from benchmarks.teach_tasks import TASKS, Rows, Task, examples, read  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MODES: dict[str, dict[str, Any]] = {
    "hybrid": {"schedule.max_staleness": 0},
    # Without the correction, the clip removes the gradient of the tokens that moved most.
    "async": {
        "schedule.max_staleness": 1,
        "schedule.on_sync": "swap",
        "algorithm.correction": "truncate",
    },
}
COLORS = {"hybrid": "tab:blue", "async": "tab:orange"}


def warm_up(task: Task, model: str, data: tuple[Rows, Rows], folder: Path) -> dict[str, Any]:
    """Fine-tune the model on the answers of the data set."""
    begun = time.perf_counter()
    settings = {key: value for key, value in task.settings.items() if "train." not in key}
    before = paceline.evaluate(
        model=model, data=data[1], reward=task.reward, run_dir=str(folder / "before"), **settings
    )
    between = time.perf_counter()
    rows = examples(data[0], task.settings)
    warm = paceline.sft(
        model=model, data=rows, run_dir=str(folder / "sft"), display=False, **(task.sft or {})
    )
    return {
        "before_sft": round(before["pass@1"], 4),
        "evaluation_seconds": round(between - begun, 1),
        "sft_seconds": round(time.perf_counter() - between, 1),
        "sft_steps": warm.summary["steps"],
        "model": str(warm.checkpoint),
    }


def run(options: argparse.Namespace, mode: str, seed: int, data: tuple[Rows, Rows]) -> Any:
    task, given = TASKS[options.task], dict(pair.split("=", 1) for pair in options.set)
    small = task.cpu if options.cpu else {}
    settings = task.settings | small | MODES[mode] | {k: _read(v) for k, v in given.items()}
    skipped = mock.patch.object(paceline.run, "save_checkpoint", no_checkpoint)
    with tempfile.TemporaryDirectory() as folder, skipped:
        done = paceline.train(
            model=options.model,
            data=data[0],
            evaluation_data=data[1],
            reward=task.reward,
            steps=options.steps or task.steps,
            seed=seed,
            run_dir=folder,
            save_every=0,
            display=False,
            evaluation={"every": options.every or task.every, "keep_best": False},
            **settings,
        )
        lines = (Path(folder) / "evaluations.jsonl").read_text().splitlines()
        metrics = done.metrics
        if options.metrics:
            name = f"teach_{options.task}_{mode}_{seed}.jsonl"
            shutil.copy(Path(folder) / "metrics.jsonl", options.metrics / name)
    found = [json.loads(line) for line in lines]
    start = found[0]["wall_time_s"] - found[0]["seconds"]
    steps = [b["wall_time_s"] - a["wall_time_s"] for a, b in itertools.pairwise(metrics)]
    return {
        "mode": mode,
        "seed": seed,
        "max_staleness": settings["schedule.max_staleness"],
        "set": {key: _read(value) for key, value in given.items()},
        "accuracy": [
            [round(line["wall_time_s"] - start, 1), line["step"], round(line["pass@1"], 4)]
            for line in found
        ],
        "seconds": round(metrics[-1]["wall_time_s"] - start, 1),
        "evaluation_seconds": [round(line["seconds"], 1) for line in found],
        "step_s": round(statistics.median(steps), 3),
        "tokens_mean": [round(line["tokens_mean"], 1) for line in (found[0], found[-1])],
        "rewards": [round(row["reward/mean"], 4) for row in metrics],
    }


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def show(runs: list[dict[str, Any]]) -> None:
    print("mode | seed | accuracy first, best, last | seconds | seconds a step")
    for made in runs:
        values = [point[2] for point in made["accuracy"]]
        print(
            f"{made['mode']} | {made['seed']} | {values[0]:.3f}, {max(values):.3f}, "
            f"{values[-1]:.3f} | {made['seconds']} | {made['step_s']}"
        )


def plot(result: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "paceline"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    labels: set[str] = set()
    for made in result["runs"]:
        label = made["mode"] + (", other settings" if made["set"] else "")
        axes.plot(
            [seconds / 60 for seconds, _, _ in made["accuracy"]],
            [accuracy for _, _, accuracy in made["accuracy"]],
            color=COLORS[made["mode"]],
            label=None if label in labels else label,
            linestyle="--" if made["set"] else "-",
            marker=".",
        )
        labels.add(label)
    axes.set_xlabel("minutes, evaluations included")
    axes.set_ylabel("held-out accuracy")
    title = f"{result['name']}, {result['held_out']} held-out rows, {result['device']}"
    axes.set_title(title, fontsize="small")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", help="name of the model in the results; default: its folder")
    parser.add_argument("--train", type=Path)
    parser.add_argument("--test", type=Path)
    parser.add_argument("--limit", type=int, help="held-out rows; default: all")
    parser.add_argument("--modes", default="hybrid,async")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--every", type=int)
    parser.add_argument("--append", action="store_true", help="keep the runs of earlier commands")
    parser.add_argument("--metrics", type=Path, help="directory for the metrics of every step")
    parser.add_argument("--cpu", action="store_true", help="smaller steps, for two cores")
    parser.add_argument("--set", action="append", default=[], help="additional key=value")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import torch
    import transformers

    task = TASKS[options.task]
    data = read(task, options.train, options.test, options.limit)
    result: dict[str, Any] = {
        "name": f"{options.name or Path(options.model).name}, {options.task}",
        **origin(),
        "device": device(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "settings": task.settings | (task.cpu if options.cpu else {}),
        "held_out": len(data[1]),
        "runs": [],
    }
    out = options.out or RESULTS / f"teach_{options.task}.json"
    if options.append and out.exists():
        result["runs"] = json.loads(out.read_text())["runs"]
    with tempfile.TemporaryDirectory() as folder:
        if task.sft is not None:
            result["sft"] = warm_up(task, options.model, data, Path(folder))
            options.model = result["sft"].pop("model")
            print(json.dumps(result["sft"]), flush=True)
        for seed, mode in itertools.product(
            map(int, options.seeds.split(",")), options.modes.split(",")
        ):
            result["runs"].append(run(options, mode, seed, data))
            print(json.dumps(result["runs"][-1]), flush=True)
            write(out, result)
    show(result["runs"])
    plot(result, IMAGES / f"{out.stem}.svg" if out.parent == RESULTS else out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
