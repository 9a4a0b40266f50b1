"""What the device-time ledger and the trace cost: the ratio of train steps per second.

    python benchmarks/instrumentation_cost.py [--steps 60] [--rounds 5] [--model tiny]

A small model is trained on a CPU (or one GPU) with short completions, where every decode step and
message weighs most. Each round runs three variants in turn, so that other load on the machine meets
all of them: "off" (the clocks of the workers, the timeline and the ledger do nothing), "ledger" (as
by default) and "trace" (trace = true). The cost is 1 minus the median of the ratios of the rounds.
The workers are threads of this process, so that "off" can be switched here; with a GPU, they are
made threads too. Exit code 1 if the ledger or the trace costs more than the limit of 2 %.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from paceline.config import load_config
from paceline.run import train
from paceline.workers.local import LocalCluster

RESULTS = Path(__file__).parent / "results" / "instrumentation_cost.json"
LIMIT = 0.02
MODES = {
    "hybrid sync": [],
    "fully async, overlapping": [
        "placement.overlap=true", "schedule.max_staleness=2", "schedule.on_sync=swap",
    ],
}  # fmt: skip
VARIANTS = ("off", "ledger", "trace")


@contextmanager
def switched_off() -> Iterator[None]:
    """Make every part of the instrumentation do nothing."""
    nothing = {"return_value": None}
    with (
        mock.patch("paceline.remote.host.use_clock", **nothing),
        mock.patch("paceline.remote.device_clock.DeviceClock.report", lambda clock: None),
        mock.patch("paceline.remote.device_clock.DeviceClock.due_report", lambda clock: None),
        mock.patch("paceline.timeline.Timeline.enter", lambda *_: None),
        mock.patch("paceline.timeline.Timeline.group", lambda *_: None),
        mock.patch("paceline.observe.recording.metered_workers", lambda *_: []),
    ):
        yield


def steps_per_s(model: str, mode: str, variant: str, steps: int) -> float:
    settings = [
        *("data.task=copy:4", "algorithm.name=grpo", "groups_per_step=8", "group_size=8"),
        *("rollout.max_response_length=32", f"model={model}", f"steps={steps}", "save_samples=0"),
        *(f"trace={str(variant == 'trace').lower()}", *MODES[mode]),
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(None, [*settings, f"run_dir={folder}/run"])
        if variant == "off":
            with switched_off():
                summary = asyncio.run(train(config))
        else:
            summary = asyncio.run(train(config))
    return float(summary["steps_per_s"])


def measure(model: str, steps: int, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in MODES:
        steps_per_s(model, mode, "ledger", 3)  # warm-up
        rates: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for number in range(rounds):
            # Each variant is first in turn.
            for variant in VARIANTS[number % 3 :] + VARIANTS[: number % 3]:
                rates[variant].append(steps_per_s(model, mode, variant, steps))
        found[mode] = {
            "steps_per_s": {name: round(statistics.median(r), 3) for name, r in rates.items()},
            "cost": {name: round(_cost(rates[name], rates["off"]), 4) for name in VARIANTS[1:]},
        }
        print(json.dumps({mode: found[mode]}), flush=True)
    return found


def _cost(rates: list[float], without: list[float]) -> float:
    return 1 - statistics.median(a / b for a, b in zip(rates, without, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="tiny")
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    # Without GPUs of its own, the only worker is a thread of this process.
    with mock.patch.object(LocalCluster, "gpus", lambda *_: []):
        found = measure(args.model, args.steps, args.rounds)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "machine": f"{device}, {os.cpu_count()} cores, {platform.machine()}",
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "versions": {"torch": torch.__version__},
        "model": args.model,
        "steps": args.steps,
        "rounds": args.rounds,
        "limit": LIMIT,
        "modes": found,
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    worst = max(cost for mode in found.values() for cost in mode["cost"].values())
    print(f"highest cost {worst:.1%}, limit {LIMIT:.0%}; written to {RESULTS}")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
