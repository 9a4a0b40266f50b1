"""Real time of a simulation of 1,000 devices and 100 steps, on one core.

    python benchmarks/simulator.py [--quick]

500 engines and 500 training devices, 512 prompts x 8 completions per step, fully async with
max_staleness 2, lengths lognormal with a median of 500 and a p99 of 10 times that; hybrid sync
on 1,000 shared devices. The limit is 60 s each.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.report import RESULTS, circumstances, command_line, write
from paceline.schedule import ScheduleSettings
from paceline.simulator.costs import CostModel
from paceline.simulator.lengths import read_distribution
from paceline.simulator.simulation import Scenario, simulate
from paceline.types import OnSync

MODES: dict[str, dict[str, Any]] = {
    "hybrid sync": {"schedule": ScheduleSettings(), "shared": True, "engines": 1000},
    "fully async": {
        "schedule": ScheduleSettings(max_staleness=2, on_sync=OnSync.SWAP),
        "engines": 500,
    },
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="5 steps, no file written")
    steps = 5 if parser.parse_args().quick else 100
    results = {}
    for mode, options in MODES.items():
        scenario = Scenario(
            costs=CostModel(),
            lengths=read_distribution("lognormal:500,1.0").tokens(8192),
            steps=steps,
            groups_per_step=512,
            group_size=8,
            slots=64,
            train_devices=1000 if "shared" in options else 500,
            **options,
        )
        begun, used = time.perf_counter(), time.process_time()
        outcome = simulate(scenario)
        results[mode] = {
            "seconds": round(time.perf_counter() - begun, 1),
            "cpu_s": round(time.process_time() - used, 1),
            "simulated_steps_per_s": round(outcome.steps_per_s, 4),
            "groups": outcome.groups,
        }
        sys.stdout.write(f"{mode}, {steps} steps: {json.dumps(results[mode])}\n")
        sys.stdout.flush()
    if steps == 100:
        write(RESULTS / "simulator.json", circumstances() | results)


if __name__ == "__main__":
    main()
