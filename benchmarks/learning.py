"""Reward of async and sync training by step and by time, with and without staleness correction.

    python benchmarks/learning.py [--quick]

Scoring a group takes a lognormal time (median 0.1 s, p99 0.8 s), as with a tool, a sandbox or an
LLM judge. The time is fixed per prompt, so every case waits for the same prompts. Sync waits for
the slowest prompt of each step; async generates and trains meanwhile.

Writes benchmarks/results/learning.json and the plot docs/images/learning.svg: reward by step (the
cost of staleness) and reward by wall time (the gain). Needs matplotlib (extra `bench`).
"""

import asyncio
import math
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
import paceline.run
from benchmarks.report import RESULTS, command_line, origin, read_metrics, write
from paceline import generation
from paceline.config import load_config
from paceline.reward.reward import Reward, open_reward
from paceline.types import Prompt, Trajectory

ROOT = Path(__file__).resolve().parents[1]
PLOT = ROOT / "docs" / "images" / "learning.svg"

COMMON = [
    "data.task=reverse:5",
    "data.max_prompt_length=32",
    "rollout.max_response_length=8",
    "rollout.slots=256",
    "train.learning_rate=4e-4",
    # Without what keeps long runs stable, so that the effect of staleness alone is measured.
    "train.betas=[0.9,0.999]",
    "train.staleness_kl_target=0",
    "save_every=0",
]
ASYNC = ["placement.actor=train", "placement.rollout=rollout", "schedule.on_sync=swap"]
CORRECTED = ["algorithm.correction=truncate"]
CASES = {
    "hybrid sync": [],
    "async, staleness 3, corrected": [*ASYNC, "schedule.max_staleness=3", *CORRECTED],
    "async, staleness 8": [*ASYNC, "schedule.max_staleness=8"],
    "async, staleness 8, corrected": [*ASYNC, "schedule.max_staleness=8", *CORRECTED],
    "async, staleness 16": [*ASYNC, "schedule.max_staleness=16"],
    "async, staleness 16, corrected": [*ASYNC, "schedule.max_staleness=16", *CORRECTED],
}
MAIN = ("hybrid sync", "async, staleness 3, corrected")  # five seeds; the other cases have three


class SlowReward:
    """A reward that arrives after a random time that depends only on the prompt."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    async def score(
        self, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> Sequence[float | Mapping[str, float]]:
        await asyncio.sleep(
            random.Random(prompt.uid).lognormvariate(math.log(0.1), math.log(8) / 2.326)
        )
        return await self._reward.score(prompt, trajectories)

    async def close(self) -> None:
        await self._reward.close()


async def open_slow_reward(*args: Any) -> SlowReward:
    return SlowReward(await open_reward(*args))


def learn(case: str, seed: int, steps: int, run_dir: Path) -> list[tuple[float, float]]:
    """Return seconds since the begin of the first step and the mean reward, for every step."""
    settings = [*COMMON, *CASES[case], f"seed={seed}", f"steps={steps}", f"run_dir={run_dir}"]
    asyncio.run(paceline.run.train(load_config(None, settings)))
    rows = read_metrics(run_dir)
    begin = (
        rows[0]["wall_time_s"]
        - rows[0]["time/wait_s"]
        - rows[0]["time/train_s"]
        - rows[0]["time/sync_s"]
    )
    return [(row["wall_time_s"] - begin, row["reward/mean"]) for row in rows]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="one seed, few steps, no files written"
    )
    options = parser.parse_args()
    seeds, steps = (range(1), 15) if options.quick else (range(5), 45)
    mock.patch.object(generation, "open_reward", open_slow_reward).start()
    curves: dict[str, list[list[tuple[float, float]]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in seeds:
            for case in CASES:
                if seed < 3 or case in MAIN:
                    curves[case].append(learn(case, seed, steps, Path(scratch) / f"{seed}-{case}"))
    report = summarize(curves, steps)
    show(report)
    if not options.quick:
        write(RESULTS / "learning.json", report)
        plot(curves)


def summarize(curves: dict[str, list[list[tuple[float, float]]]], steps: int) -> dict[str, Any]:
    sync_s = statistics.median(run[-1][0] for run in curves["hybrid sync"])
    cases = {}
    for case, runs in curves.items():
        final = [statistics.fmean(reward for _, reward in run[-10:]) for run in runs]
        half = [
            statistics.fmean([reward for second, reward in run if second <= sync_s / 2][-5:])
            for run in runs
        ]
        cases[case] = {
            "final_mean": statistics.fmean(final),
            "final_sd": statistics.stdev(final) if len(final) > 1 else 0.0,
            "finals": final,
            "reward_at_half_of_sync_time": statistics.fmean(half),
            "seconds": statistics.median(run[-1][0] for run in runs),
            "seconds_to_0.9": statistics.median(_reaches(run, 0.9) for run in runs),
        }
    return origin() | {
        "machine": f"{torch.get_num_threads()} cores, {platform.machine()}; "
        f"torch {torch.__version__}",
        "work": f"GRPO on reverse:5, 16 prompts x 8 completions per step, {steps} steps, "
        "5 seeds (3 for staleness 8 and 16)",
        "cases": cases,
    }


def _reaches(run: list[tuple[float, float]], level: float) -> float:
    """Return seconds until the mean of five steps reaches the level, or of the whole run."""
    for index in range(4, len(run)):
        if statistics.fmean(reward for _, reward in run[index - 4 : index + 1]) >= level:
            return run[index][0]
    return run[-1][0]


def show(report: dict[str, Any]) -> None:
    table = Table(title=report["work"])
    for column in (
        "case",
        "final reward",
        "sd over seeds",
        "after half of sync's time",
        "seconds to 0.9",
        "seconds in total",
    ):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case, f in report["cases"].items():
        rewards = (f["final_mean"], f["final_sd"], f["reward_at_half_of_sync_time"])
        table.add_row(
            case,
            *(f"{reward:.3f}" for reward in rewards),
            f"{f['seconds_to_0.9']:.1f}",
            f"{f['seconds']:.1f}",
        )
    Console(width=130).print(table)


def plot(curves: dict[str, list[list[tuple[float, float]]]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "paceline"
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for case, runs in curves.items():
        steps = range(1, len(runs[0]) + 1)
        mean = _smooth([statistics.fmean(run[i][1] for run in runs) for i in range(len(runs[0]))])
        seconds = [statistics.fmean(run[i][0] for run in runs) for i in range(len(runs[0]))]
        style = {
            "label": case,
            "linestyle": "-" if "corrected" in case or "sync" in case else ":",
            "linewidth": 1.6,
        }
        by_step.plot(steps, mean, **style)
        by_time.plot(seconds, mean, **style)
    by_step.set(xlabel="train step", ylabel="mean reward", title="at equal steps")
    by_time.set(xlabel="seconds", title="at equal wall time")
    by_step.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None})


def _smooth(values: list[float]) -> list[float]:
    return [statistics.fmean(values[max(0, i - 4) : i + 1]) for i in range(len(values))]


if __name__ == "__main__":
    main()
