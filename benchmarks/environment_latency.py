"""Train steps per second with a slow environment: synchronous against fully asynchronous.

    python benchmarks/environment_latency.py [--quick]

Conversations of three turns. Every reply of the environment takes N(1 s, 1 s), truncated at 0. Both
runs train the tiny model of recipes/hybrid.toml and recipes/fully_async.toml on the CPU with the
same batches; the environment runs in the controller, as by default. Nearly all of the time is spent
waiting, so the result depends little on the machine and its load, which the report states.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.report import RESULTS, circumstances, command_line, load_average, write
from paceline.config import load_config
from paceline.environment.protocol import Message, Reply
from paceline.loop import Metrics
from paceline.rollout.engine import EngineStats
from paceline.run import train
from paceline.types import Group

MEAN_S, DEVIATION_S, TURNS = 1.0, 1.0, 3
SHARED = ["groups_per_step=8", "group_size=4", "data.max_prompt_length=64", "save_samples=0"]
STALENESS = 2  # of recipes/fully_async.toml
STEPS = {"sync": 12, "async": 30}


class Slow:
    """Replies late, and ends the conversation at the last turn."""

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        self._random, self._turn = random.Random(str(row["prompt"])), 0
        return None

    async def step(self, message: Message) -> Reply:
        await asyncio.sleep(max(0.0, self._random.gauss(MEAN_S, DEVIATION_S)))
        self._turn += 1
        return Reply("more", done=self._turn == TURNS)


class Times:
    """Observer that keeps when steps ended, and how stale they were."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.staleness: list[float] = []

    def step_done(self, step: int, metrics: Metrics, groups: Sequence[Group]) -> None:
        self.ends.append(time.monotonic())
        self.staleness.append(metrics["staleness/mean"])

    def engines_polled(self, engines: Sequence[EngineStats], queue_utilization: float) -> None:
        return


def measure(mode: str, steps: int) -> dict[str, float]:
    """Return the steps per second of a run, without those that fill the pipeline."""
    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        recipe = "hybrid" if mode == "sync" else "fully_async"
        chosen = [f"run_dir={folder}/run", f"steps={steps}", *SHARED]
        asyncio.run(
            train(load_config(recipe, chosen), lambda _: times, environment=Slow)  # type: ignore[arg-type]
        )
    skipped = 1 + STALENESS
    seconds = times.ends[-1] - times.ends[skipped - 1]
    return {
        "steps": steps - skipped,
        "seconds": round(seconds, 1),
        "steps_per_s": round((steps - skipped) / seconds, 3),
        "staleness_mean": round(sum(times.staleness[skipped:]) / (steps - skipped), 2),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, no file written")
    quick = parser.parse_args().quick
    rows = {}
    sys.stdout.write(f"{'mode':8}{'steps/s':>10}{'s/step':>10}{'staleness':>12}\n")
    for mode, steps in STEPS.items():
        rows[mode] = row = measure(mode, 6 if quick else steps)
        sys.stdout.write(
            f"{mode:8}{row['steps_per_s']:10.3f}{1 / row['steps_per_s']:10.2f}"
            f"{row['staleness_mean']:12.2f}\n"
        )
        sys.stdout.flush()
    ratio = round(rows["async"]["steps_per_s"] / rows["sync"]["steps_per_s"], 2)
    sys.stdout.write(f"async / sync: {ratio} (load average {load_average()})\n")
    if not quick:
        write(RESULTS / "environment_latency.json", circumstances() | rows | {"ratio": ratio})


if __name__ == "__main__":
    main()
