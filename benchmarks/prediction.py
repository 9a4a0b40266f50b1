"""Predicted against measured steps per second: does the simulator name the faster mode?

    python benchmarks/prediction.py [--quick]

A probe measures the costs of engine and trainer once per placement. The simulator then predicts
hybrid sync, one step off and fully async for three distributions of lengths, and real runs of the
same load (that of benchmarks/modes.py) measure them. The aim is an error of at most 10 % each, and
the same fastest mode. Run it on a quiet machine: two processes need two cores. --quick is one
distribution with a few steps of each mode, and needs about three minutes of CPU time.
"""

import argparse
import asyncio
import json
import logging
import math
import os
import platform
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from paceline import generation
from paceline.config import RunConfig, load_config
from paceline.simulator.lengths import read_distribution
from paceline.simulator.probe import Probe, probe
from paceline.simulator.simulation import Scenario, simulate

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.models import bench_model
from benchmarks.modes import CAP, COMMON, MAIN, MODES, OTHERS, Lengths, forcing_client, measure

RESULTS = Path(__file__).parent / "results" / "prediction.json"
COMPARED = ("hybrid sync, two threads", "one step off", "fully async")
AIM = 0.10  # largest relative error


def predict(config: RunConfig, found: Probe, lengths: Lengths) -> float:
    """Return the predicted steps per second of a run on one device per pool."""
    median, p99 = lengths
    sigma = math.log(p99 / median) / 2.326
    outcome = simulate(
        Scenario(
            found.costs,
            read_distribution(f"lognormal:{median},{sigma}").tokens(CAP),
            config.schedule,
            prompt_tokens=found.prompt_tokens,
            steps=40,
            groups_per_step=config.groups_per_step,
            group_size=config.group_size,
            shared=config.takes_turns,
            copies_weights=not config.shares_weights,
            slots=config.slots,
        )
    )
    return outcome.steps_per_s


def run(steps: int, warm_up: int, all_lengths: tuple[Lengths, ...]) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        model = bench_model(Path(scratch) / "model")

        def configure(mode: str, name: str) -> RunConfig:
            place = [f"model={model}", f"run_dir={Path(scratch) / name}", f"steps={steps}"]
            return load_config(None, [*place, *COMMON, *MODES[mode]])

        probes = {mode: asyncio.run(probe(configure(mode, "probe"))) for mode in COMPARED}
        for lengths in all_lengths:
            client = mock.patch.object(generation, "EngineClient", forcing_client(lengths))
            for mode in COMPARED:
                config = configure(mode, f"{mode}-{lengths[0]}")
                with client:
                    measured = 1 / measure(config, warm_up)["step_s"]
                predicted = predict(config, probes[mode], lengths)
                rows.append(
                    {
                        "lengths": lengths,
                        "mode": mode,
                        "predicted": predicted,
                        "measured": measured,
                        "error": predicted / measured - 1,
                    }
                )
        for mode, found in probes.items():
            rows.append({"mode": mode, "costs": found.costs.model_dump()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one distribution, few steps, no file written"
    )
    quick = parser.parse_args().quick
    # a random model earns no reward, which the run would report as a warning
    logging.getLogger("paceline").setLevel(logging.ERROR)
    rows = run(*((6, 2, (MAIN,)) if quick else (24, 6, (MAIN, *OTHERS))))
    results = [row for row in rows if "error" in row]
    table = Table(title="steps per second", box=None, padding=(0, 2, 0, 0))
    for column in ("median, p99", "mode", "predicted", "measured", "error"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for row in results:
        median, p99 = row["lengths"]
        numbers = (f"{row[name]:.3g}" for name in ("predicted", "measured"))
        table.add_row(f"{median}, {p99}", row["mode"], *numbers, f"{row['error']:+.0%}")
    Console(width=100).print(table)
    right = sum(
        max(same, key=lambda row: row["predicted"]) is max(same, key=lambda row: row["measured"])
        for lengths in dict.fromkeys(row["lengths"] for row in results)
        if (same := [row for row in results if row["lengths"] == lengths])
    )
    within = sum(abs(row["error"]) <= AIM for row in results)
    load = os.getloadavg()
    sys.stdout.write(
        f"{within} of {len(results)} within {AIM:.0%}; fastest mode right {right} times; "
        f"load average {load[1]:.1f} on {os.cpu_count()} cores\n"
    )
    if not quick:
        report = {"command": " ".join(["python", *sys.argv]), "machine": platform.machine()}
        report |= {"date": date.today().isoformat(), "load_average": load}
        report |= {"torch": torch.__version__, "rows": rows}
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
