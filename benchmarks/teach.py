"""Held-out accuracy of a real model by training time, in several modes and with several seeds.

    python benchmarks/teach.py gsm8k --model FOLDER --train train.jsonl --test test.jsonl
    python benchmarks/teach.py sums --model FOLDER [--steps 100] [--seeds 0,1,2] [--modes hybrid]
    python benchmarks/teach.py countdown --model FOLDER

Each run evaluates the first version, every few steps and the last one on all held-out rows (greedy,
one completion each). Time counts from the start of the first evaluation, after the model has been
loaded, and includes all evaluations. Writes benchmarks/results/teach_TASK.json and, if matplotlib
is installed, docs/images/teach_TASK.svg.
"""

import argparse
import itertools
import json
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import paceline  # noqa: E402
from benchmarks import countdown  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
Rows = list[dict[str, Any]]
MODES: dict[str, dict[str, Any]] = {
    "hybrid": {"schedule.max_staleness": 0},
    "async": {"schedule.max_staleness": 2, "schedule.on_sync": "swap"},
}
COLORS = {"hybrid": "tab:blue", "async": "tab:orange"}


@dataclass(frozen=True, slots=True)
class Task:
    reward: Any
    settings: dict[str, Any]
    every: int  # steps between evaluations
    steps: int
    cpu: dict[str, Any] = field(default_factory=dict)  # smaller, for two cores


TASKS = {
    "gsm8k": Task(
        "last_number",
        {
            "groups_per_step": 32,
            "group_size": 8,
            "data.prompt_key": "question",
            "data.system": "Reason step by step, briefly. Give the result as a number at the very "
            "end.",
            "data.max_prompt_length": 400,
            "data.on_bad_row": "skip",
            "rollout.max_response_length": 320,
            "train.learning_rate": 2e-6,
            "algorithm.aggregation": "token",  # as TRL's default
        },
        every=10,
        steps=100,
    ),
    "sums": Task(
        "last_number",
        {
            "groups_per_step": 64,
            "group_size": 8,
            "data.max_prompt_length": 100,
            "rollout.max_response_length": 24,
            "train.learning_rate": 1e-5,
        },
        every=10,
        steps=100,
        cpu={"groups_per_step": 8},
    ),
    "countdown": Task(
        countdown.solved,
        {
            "groups_per_step": 64,
            "group_size": 8,
            "data.max_prompt_length": 150,
            "rollout.max_response_length": 48,
            "train.learning_rate": 2e-6,
        },
        every=10,
        steps=100,
    ),
}


def sums(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield sums of three numbers, all different."""
    numbers, seen = random.Random(seed), set()
    while len(seen) < count:
        terms = tuple(numbers.randint(2, 99) for _ in range(3))
        if terms not in seen:
            seen.add(terms)
            text = " + ".join(map(str, terms))
            yield {"prompt": f"What is {text}? Answer with the number.", "answer": str(sum(terms))}


def read(options: argparse.Namespace) -> tuple[Rows, Rows]:
    """Return the rows to train on and the held-out ones."""
    if options.task == "gsm8k":
        files = (options.train, options.test)
        made = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        return made[0], made[1][: options.limit]
    rows = list((sums if options.task == "sums" else countdown.rows)(9000, 0))
    return rows[1000:], rows[:1000][: options.limit]


def run(options: argparse.Namespace, mode: str, seed: int, data: tuple[Rows, Rows]) -> Any:
    task, given = TASKS[options.task], dict(pair.split("=", 1) for pair in options.set)
    small = task.cpu if options.cpu else {}
    settings = task.settings | small | MODES[mode] | {k: _read(v) for k, v in given.items()}
    if mode == "async" and options.staleness is not None:
        settings["schedule.max_staleness"] = options.staleness
    with tempfile.TemporaryDirectory() as folder:
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
        "evaluation_seconds": round(sum(line["seconds"] for line in found), 1),
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
        label = ", ".join([made["mode"], *(f"{k}={v}" for k, v in made["set"].items())])
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument("--staleness", type=int, help="bound of async runs; default: 2")
    parser.add_argument("--append", action="store_true", help="keep the runs of earlier commands")
    parser.add_argument("--metrics", type=Path, help="directory for the metrics of every step")
    parser.add_argument("--cpu", action="store_true", help="smaller steps, for two cores")
    parser.add_argument("--set", action="append", default=[], help="additional key=value")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import torch
    import transformers

    data = read(options)
    gpu = torch.cuda.is_available()
    result: dict[str, Any] = {
        "name": f"{options.name or Path(options.model).name}, {options.task}",
        "command": "python " + " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if gpu else platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "settings": TASKS[options.task].settings | (TASKS[options.task].cpu if options.cpu else {}),
        "held_out": len(data[1]),
        "runs": [],
    }
    out = options.out or RESULTS / f"teach_{options.task}.json"
    if options.append and out.exists():
        result["runs"] = json.loads(out.read_text())["runs"]
    for seed in map(int, options.seeds.split(",")):
        for mode in options.modes.split(","):
            result["runs"].append(run(options, mode, seed, data))
            print(json.dumps(result["runs"][-1]), flush=True)
            out.write_text(json.dumps(result, indent=1) + "\n")
    show(result["runs"])
    plot(result, IMAGES / f"{out.stem}.svg" if out.parent == RESULTS else out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
