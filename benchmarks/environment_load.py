"""CPU time of the controller per trajectory, against the number of episodes that wait.

    python benchmarks/environment_load.py [--quick]

The real loop, rollouter, router and queue in virtual time, with 20 simulated engines of 16 slots,
groups of 8 and episodes of two turns. In "engine", the environment replies at once and the groups
that find no engine with room wait. In "environment", each turn waits 60 s for its environment.
Compare the rows of a column: a constant cost per trajectory means that waiting is free.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.report import RESULTS, circumstances, command_line, write
from paceline.schedule import ScheduleSettings
from paceline.simulator.costs import CostModel
from paceline.simulator.lengths import read_distribution
from paceline.simulator.simulation import Scenario, simulate
from paceline.types import OnSync

GROUP_SIZE = 8
WAITS = {"engine": "fixed:0", "environment": "fixed:60"}
GROUPS = (32, 64, 128, 256, 512)  # in flight; the smallest have room on the engines


def measure(environment_s: str, groups: int, trajectories: int) -> dict[str, float]:
    """Return the cost of a run with this many groups in flight."""
    schedule = ScheduleSettings(max_staleness=1, on_sync=OnSync.SWAP)
    per_step = groups // 2
    steps = max(4, trajectories // (per_step * GROUP_SIZE))
    scenario = Scenario(
        costs=CostModel(turns=2, environment_s=environment_s),
        lengths=read_distribution("lognormal:200,0.5").tokens(2048),
        schedule=schedule,
        steps=steps,
        groups_per_step=per_step,
        group_size=GROUP_SIZE,
        engines=20,
        slots=16,
    )
    begun = time.process_time()
    outcome = simulate(scenario)
    cpu_s = time.process_time() - begun
    made = outcome.groups["trained"] * GROUP_SIZE
    return {
        "episodes_in_flight": groups * GROUP_SIZE,
        "trajectories": made,
        "us_per_trajectory": round(1e6 * cpu_s / made, 1),
        "simulated_steps_per_s": round(outcome.steps_per_s, 4),
        "engines_idle": round(outcome.engines_idle, 3),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="few trajectories, no file written")
    quick = parser.parse_args().quick
    results: dict[str, list[dict[str, float]]] = {}
    for name, environment_s in WAITS.items():
        measure(environment_s, 32, 1024)  # warm up
        for groups in GROUPS:
            row = measure(environment_s, groups, 2048 if quick else 16_384)
            results.setdefault(name, []).append(row)
            sys.stdout.write(f"{name}: {json.dumps(row)}\n")
            sys.stdout.flush()
    if not quick:
        write(RESULTS / "environment_load.json", circumstances() | results)


if __name__ == "__main__":
    main()
