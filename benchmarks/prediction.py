"""Predicted against measured steps per second: does the simulator name the faster mode?

    python benchmarks/prediction.py [--lengths 40,320] [--quick]

A probe measures the costs of engine and trainer before each run. The simulator then predicts
hybrid sync, one step off and fully async for three distributions of lengths (median and p99), and
real runs of the same load (that of benchmarks/modes.py) measure them. The aim is an error of at
most 10 % each, and the same fastest mode. Run it on a quiet machine: two processes need two cores.
All three take about 12 minutes on two cores; --lengths measures one of them again and keeps the
other rows of the result. --quick has a few steps of one distribution and writes no file.

On a GPU, benchmarks/gpu_prediction.py does the same with other loads and modes.
"""

import asyncio
import itertools
import json
import logging
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from paceline import generation
from paceline.config import RunConfig, load_config
from paceline.run import train
from paceline.simulator.lengths import Distribution
from paceline.simulator.probe import Probe, probe
from paceline.simulator.simulation import Outcome, Scenario, simulate

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.forced_lengths import forcing_client
from benchmarks.models import bench_model
from benchmarks.modes import COMMON, MAIN, MODES, OTHERS, Lengths, length_of
from benchmarks.report import (
    RESULTS,
    command_line,
    load_average,
    machine,
    origin,
    read_metrics,
    write,
)

COMPARED = ("hybrid sync, one thread", "one step off", "fully async")
AIM = 0.10  # largest relative error
STEPS, WARM_UP = 24, 6
PARTS = ("wait", "train", "sync")  # of a step, in the view of the trainer
Row = dict[str, Any]


def predict(config: RunConfig, found: Probe, lengths: Distribution) -> Outcome:
    """Predict a run on one device per pool."""
    return simulate(
        Scenario(
            found.costs,
            lengths.tokens(config.rollout.max_response_length),
            config.schedule,
            prompt_tokens=found.prompt_tokens,
            steps=40,
            groups_per_step=config.groups_per_step,
            group_size=config.group_size,
            shared=config.takes_turns or config.placement.overlap,
            overlap=config.placement.overlap,
            copies_weights=not config.shares_weights,
            slots=config.slots,
        )
    )


def measure(config: RunConfig, warm_up: int) -> Row:
    """Run the recipe; return its steps per second, the mean parts of a step, and all steps."""
    asyncio.run(train(config))
    rows = read_metrics(config.run_dir)
    steady = rows[warm_up:]
    seconds = steady[-1]["wall_time_s"] - rows[warm_up - 1]["wall_time_s"]
    means = {part: statistics.mean(row[f"time/{part}_s"] for row in steady) for part in PARTS}
    steps = itertools.pairwise(row["wall_time_s"] for row in rows[warm_up - 1 :])
    return {
        "steps_per_s": len(steady) / seconds,
        **{f"{part}_s": s for part, s in means.items()},
        "seconds": [round(end - begin, 3) for begin, end in steps],
    }


def compare(load: str, mode: str, predicted: Outcome, measured: Row) -> Row:
    parts = {f"{part}_s": getattr(predicted, f"{part}_s") for part in PARTS}
    return {
        "load": load,
        "mode": mode,
        "predicted": {"steps_per_s": predicted.steps_per_s, **parts},
        "measured": measured,
        "error": predicted.steps_per_s / measured["steps_per_s"] - 1,
    }


def run(all_lengths: Sequence[Lengths], steps: int, warm_up: int) -> Iterator[list[Row]]:
    """Yield the rows of each distribution."""
    with tempfile.TemporaryDirectory() as scratch:
        model = bench_model(Path(scratch) / "model")

        def configure(mode: str, name: str) -> RunConfig:
            place = [f"model={model}", f"run_dir={Path(scratch) / name}", f"steps={steps}"]
            return load_config(None, [*place, *COMMON, *MODES[mode]])

        for lengths in all_lengths:
            client, rows = forcing_client(partial(length_of, lengths)), []
            for mode in COMPARED:
                # Right before the run, because the speed of a shared machine changes.
                found = asyncio.run(probe(configure(mode, "probe")))
                config = configure(mode, f"{mode}-{lengths[0]}")
                with mock.patch.object(generation, "EngineClient", client):
                    measured = measure(config, warm_up)
                predicted = predict(config, found, _made(config, lengths))
                row = compare("median {}, p99 {}".format(*lengths), mode, predicted, measured)
                rows.append(row | {"costs": found.costs.model_dump()})
            yield rows


def _made(config: RunConfig, lengths: Lengths) -> Distribution:
    """Return the lengths of the run: a sample this small differs from its distribution."""
    groups = range(config.steps * config.groups_per_step)
    made = [length_of(lengths, f"{s}.{i}.0") for s in groups for i in range(config.group_size)]
    # The simulator takes values by the seed of a completion; a prime number of them, in any order.
    return Distribution(f"lognormal {lengths}", random.Random(0).sample(made, _prime(len(made))))


def _prime(most: int) -> int:
    return next(n for n in range(most, 1, -1) if all(n % k for k in range(2, math.isqrt(n) + 1)))


def show(rows: Sequence[Row]) -> None:
    """Print all rows, and how many are within the aim."""
    table = Table(title="steps per second", box=None, padding=(0, 2, 0, 0))
    for column in ("load", "mode", "predicted", "measured", "error", *PARTS):
        table.add_column(column, justify="left" if column in ("load", "mode") else "right")
    for row in rows:
        both = row["predicted"], row["measured"]
        speeds = (f"{each['steps_per_s']:.3g}" for each in both)
        parts = (" / ".join(f"{each[f'{part}_s']:.3g}" for each in both) for part in PARTS)
        table.add_row(row["load"], row["mode"], *speeds, f"{row['error']:+.1%}", *parts)
    Console(width=140).print(table)
    loads = {row["load"]: [each for each in rows if each["load"] == row["load"]] for row in rows}
    right = sum(fastest(same, "predicted") == fastest(same, "measured") for same in loads.values())
    within = sum(abs(row["error"]) <= AIM for row in rows)
    print(
        f"{within} of {len(rows)} within {AIM:.0%}; fastest mode right for {right} of {len(loads)} "
        f"loads; load average {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores"
    )


def fastest(rows: Sequence[Row], kind: str) -> str:
    return str(max(rows, key=lambda row: float(row[kind]["steps_per_s"]))["mode"])


def add(path: Path, rows: Sequence[Row], device: str) -> None:
    """Add the rows to the file in place of earlier ones of the same loads."""
    loads = {row["load"] for row in rows}
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    report = origin() | {
        "machine": device,
        "load_average": load_average(),
        "torch": torch.__version__,
        "rows": [*(row for row in earlier if row["load"] not in loads), *rows],
    }
    write(path, report)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--lengths", help="only this distribution: median,p99")
    parser.add_argument("--quick", action="store_true", help="few steps, no file written")
    options = parser.parse_args()
    # a random model earns no reward, which the run would report as a warning
    logging.getLogger("paceline").setLevel(logging.ERROR)
    all_lengths = [MAIN, *OTHERS][: 1 if options.quick else None]
    if options.lengths:
        median, p99 = map(int, options.lengths.split(","))
        all_lengths = [(median, p99)]
    rows: list[Row] = []
    for found in run(all_lengths, *((8, 3) if options.quick else (STEPS, WARM_UP))):
        rows += found
        if not options.quick:
            add(RESULTS / "prediction.json", found, machine())
    show(rows)


if __name__ == "__main__":
    main()
