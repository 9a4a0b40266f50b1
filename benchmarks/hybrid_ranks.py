"""Generation of a two-rank hybrid run: every rank generates against one rank alone.

    python benchmarks/hybrid_ranks.py

Two FSDP ranks train in both cases, on 128 completions of 128 tokens per step. In the second, one
engine takes all requests, as before every rank had an engine. Runs alternate, medians are compared,
and the result is a ratio of one run.
"""

import argparse
import asyncio
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.models import bench_model
from paceline import generation
from paceline.config import load_config
from paceline.remote.worker import Worker
from paceline.run import train
from paceline.workers.engines import engine_workers

RESULTS = Path(__file__).parent / "results" / "hybrid_ranks.json"
SETTINGS = [
    "groups_per_step=16",
    "group_size=8",
    "rollout.max_response_length=128",
    "rollout.slots=128",
    "placement.threads=1",
    "data.task=reverse:5",
    "save_samples=0",
]


def first_engine(*arguments: Any) -> Sequence[Worker]:
    return engine_workers(*arguments)[:1]


def measure(model: str, ranks: int, steps: int) -> dict[str, float]:
    """Return generated tokens per second of waiting for groups, and the number of engines."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            "recipes/fsdp_hybrid.toml",
            [f"model={model}", f"steps={steps}", f"run_dir={folder}", *SETTINGS],
        )
        chosen = first_engine if ranks == 1 else engine_workers
        with mock.patch.object(generation, "engine_workers", chosen):
            asyncio.run(train(config))
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines][1:]  # warm-up
    seconds = sum(row["time/wait_s"] for row in rows)
    tokens = sum(row["rollout/tokens"] for row in rows)
    return {"tokens_per_s": tokens / seconds, "engines": rows[0]["fleet/engines"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    # a random model earns no reward, which the run would report as a warning
    logging.getLogger("paceline").setLevel(logging.ERROR)
    speeds: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        model = bench_model(Path(folder) / "model")
        for _ in range(options.repeats):
            for ranks in speeds:
                found = measure(model, ranks, options.steps)
                assert found["engines"] == ranks, found
                speeds[ranks].append(found["tokens_per_s"])
                print(f"{ranks} generating: {found['tokens_per_s']:,.0f} tokens/s", flush=True)
    one, two = statistics.median(speeds[1]), statistics.median(speeds[2])
    result = {
        "date": date.today().isoformat(),
        "one_rank_tokens_per_s": speeds[1],
        "two_ranks_tokens_per_s": speeds[2],
        "ratio": two / one,
        "limit": "2.0 (two cores)",
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"| one rank | two ranks | ratio | limit |\n|---|---|---|---|\n"
        f"| {one:,.0f} | {two:,.0f} | {two / one:.2f} | 2.00 |"
    )


if __name__ == "__main__":
    main()
