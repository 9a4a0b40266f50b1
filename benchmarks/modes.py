"""Training speed of async and sync modes with long-tailed completion lengths, on two CPU cores.

    python benchmarks/modes.py [--quick]

Lengths are lognormal and fixed per trajectory, so all modes generate and train the same tokens.
Runs are interleaved and repeated with p99 = 8 x median; two other distributions run once each. The
ratio compares medians of tokens trained per second in steady state with the faster of the two
hybrid sync modes: in the long tail few sequences are left, and a second thread does not speed them
up.
"""

import asyncio
import logging
import platform
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from rich.console import Console
from rich.table import Table

import paceline.run
from paceline import generation
from paceline.config import RunConfig, load_config

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.forced_lengths import forced_length, forcing_client
from benchmarks.models import bench_model
from benchmarks.report import RESULTS, command_line, origin, read_metrics, write

CAP = 512
Lengths = tuple[int, int]  # median and p99 of completions
MAIN: Lengths = (40, 320)
OTHERS: tuple[Lengths, ...] = ((80, 320), (24, 384))

COMMON = [
    "groups_per_step=16",
    "group_size=8",
    "data.task=sort:5",
    "data.max_prompt_length=16",
    f"rollout.max_response_length={CAP}",
    "save_every=0",
]
MODES = {
    "hybrid sync, two threads": [
        "schedule.max_staleness=0",
        "rollout.slots=128",
        "placement.threads=2",
    ],
    "hybrid sync, one thread": [
        "schedule.max_staleness=0",
        "rollout.slots=128",
        "placement.threads=1",
    ],
    "one step off": [
        "placement.actor=train",
        "placement.rollout=rollout",
        "schedule.max_staleness=1",
        "rollout.slots=128",
    ],
    "fully async": [
        "placement.actor=train",
        "placement.rollout=rollout",
        "schedule.max_staleness=2",
        "schedule.on_sync=swap",
        "rollout.slots=96",
    ],
}


def length_of(lengths: Lengths, request_id: str) -> int:
    """Return the predetermined length of a completion."""
    return forced_length(request_id, *lengths, CAP)


def measure(config: RunConfig, warm_up: int) -> dict[str, float]:
    summary = asyncio.run(paceline.run.train(config))
    rows = read_metrics(config.run_dir)
    steady = rows[warm_up:]
    seconds = steady[-1]["wall_time_s"] - rows[warm_up - 1]["wall_time_s"]
    return {
        "tokens_per_s": sum(row["rollout/tokens"] for row in steady) / seconds,
        "step_s": seconds / len(steady),
        "train_busy": sum(row["train/busy_s"] for row in steady) / seconds,
        "rollout_busy": summary["rollout_busy_fraction"],
        "staleness_max": summary["staleness_max"],
        "staleness_mean": summary["staleness_mean"],
        "sync_ms": summary["sync_latency_s"] * 1000,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="one short repetition, no file written"
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    repeats, steps, warm_up = (1, 8, 3) if options.quick else (options.repeats, 24, 6)
    # a random model earns no reward, which the run would report as a warning
    logging.getLogger("paceline").setLevel(logging.ERROR)
    report = summarize(MAIN, compare(MAIN, repeats, steps, warm_up))
    show(report)
    if options.quick:
        return
    report["other_lengths"] = []
    for lengths in OTHERS:
        other = summarize(lengths, compare(lengths, 1, steps, warm_up))
        show(other)
        report["other_lengths"].append({name: other[name] for name in ("work", "modes")})
    write(RESULTS / "modes.json", report)


def compare(
    lengths: Lengths, repeats: int, steps: int, warm_up: int
) -> dict[str, list[dict[str, float]]]:
    """Return the results of all modes, repeated in turn."""
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    client = mock.patch.object(
        generation, "EngineClient", forcing_client(partial(length_of, lengths))
    )
    with tempfile.TemporaryDirectory() as scratch, client:
        model = bench_model(Path(scratch) / "model")
        for repeat in range(repeats):
            for mode, settings in MODES.items():
                run_dir = Path(scratch) / f"{mode}-{repeat}"
                config = load_config(
                    None,
                    [f"model={model}", f"run_dir={run_dir}", f"steps={steps}", *COMMON, *settings],
                )
                runs[mode].append(measure(config, warm_up))
    return runs


def summarize(lengths: Lengths, runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    modes = {
        mode: {name: statistics.median(run[name] for run in found) for name in found[0]}
        for mode, found in runs.items()
    }
    base = max(
        metrics["tokens_per_s"] for mode, metrics in modes.items() if mode.startswith("hybrid")
    )
    for metrics in modes.values():
        metrics["ratio"] = metrics["tokens_per_s"] / base
    return origin() | {
        "machine": f"{torch.get_num_threads()} cores, {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "work": "128 completions per step, lognormal lengths "
        f"(median {lengths[0]}, p99 {lengths[1]}, at most {CAP}); 0.8M-parameter Qwen2 shape",
        "modes": modes,
        "all_tokens_per_s": {
            mode: [round(run["tokens_per_s"]) for run in found] for mode, found in runs.items()
        },
    }


def show(report: dict[str, Any]) -> None:
    table = Table(title=report["work"])
    for column in (
        "mode",
        "tokens trained/s",
        "ratio",
        "step s",
        "rollout busy",
        "train busy",
        "staleness mean / max",
        "weight sync ms",
    ):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for mode, f in report["modes"].items():
        table.add_row(
            mode,
            f"{f['tokens_per_s']:,.0f}",
            f"{f['ratio']:.2f}x",
            f"{f['step_s']:.2f}",
            f"{f['rollout_busy']:.0%}",
            f"{f['train_busy']:.0%}",
            f"{f['staleness_mean']:.2f} / {f['staleness_max']:.0f}",
            f"{f['sync_ms']:.1f}",
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
