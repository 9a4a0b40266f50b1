"""Generation of a two-rank hybrid run: every rank generates against one rank alone.

    python benchmarks/hybrid_ranks.py

Two FSDP ranks train in both cases. In the second, one engine takes all requests, as before every
rank had an engine. Runs alternate; the result is the ratio of the medians of three runs. Two
models: 25M parameters with 128 completions of 32 tokens, and 0.8M with 128 completions of 128
tokens, whose decode steps mostly consist of the cost of starting operations. Slots are automatic:
at most 64 per engine for the larger model, and 256 for the smaller.
"""

import asyncio
import logging
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.models import bench_model
from benchmarks.report import RESULTS, circumstances, command_line, read_metrics, write
from paceline import generation
from paceline.config import load_config
from paceline.remote.worker import Worker
from paceline.run import train
from paceline.workers.engines import engine_workers

SHAPE_25M = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}
LOADS: dict[str, tuple[dict[str, int], int, int, int]] = {  # shape, groups, tokens, steps
    "25M": (SHAPE_25M, 16, 32, 4),
    "0.8M": ({}, 16, 128, 12),
}
SETTINGS = [
    "group_size=8",
    "placement.threads=1",
    "data.task=reverse:5",
    "save_samples=0",
]


def first_engine(*arguments: Any) -> Sequence[Worker]:
    return engine_workers(*arguments)[:1]


def measure(model: str, ranks: int, settings: list[str]) -> dict[str, float]:
    """Return generated tokens per second of waiting for groups, and the number of engines."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            "fsdp_hybrid",
            [f"model={model}", f"run_dir={folder}", *SETTINGS, *settings],
        )
        chosen = first_engine if ranks == 1 else engine_workers
        with mock.patch.object(generation, "engine_workers", chosen):
            asyncio.run(train(config))
        rows = read_metrics(folder)[1:]  # after the warm-up
    seconds = sum(row["time/wait_s"] for row in rows)
    tokens = sum(row["rollout/tokens"] for row in rows)
    return {"tokens_per_s": tokens / seconds, "engines": rows[0]["fleet/engines"]}


def compare(load: str, repeats: int) -> dict[str, Any]:
    shape, groups, tokens, steps = LOADS[load]
    settings = [
        f"groups_per_step={groups}",
        f"rollout.max_response_length={tokens}",
        f"steps={steps}",
    ]
    speeds: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        model = bench_model(Path(folder) / "model", **shape)
        for _ in range(repeats):
            for ranks in speeds:
                found = measure(model, ranks, settings)
                assert found["engines"] == ranks, found
                speeds[ranks].append(round(found["tokens_per_s"], 1))
                print(f"{load}: {ranks} generating: {speeds[ranks][-1]:,.0f} tokens/s", flush=True)
    return {
        "load": f"{groups * 8} completions of at most {tokens} tokens",
        "one_rank_tokens_per_s": speeds[1],
        "two_ranks_tokens_per_s": speeds[2],
        "ratio": round(statistics.median(speeds[2]) / statistics.median(speeds[1]), 2),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    # a random model earns no reward, which the run would report as a warning
    logging.getLogger("paceline").setLevel(logging.ERROR)
    found = {load: compare(load, options.repeats) for load in LOADS}
    report = circumstances() | {"limit": "2.0 (two cores)"} | found
    write(RESULTS / "hybrid_ranks.json", report)
    print("| model | one rank | two ranks | ratio | limit |\n|---|---|---|---|---|")
    for load, row in found.items():
        one, two = (statistics.median(row[f"{n}_tokens_per_s"]) for n in ("one_rank", "two_ranks"))
        print(f"| {load} | {one:,.0f} | {two:,.0f} | {row['ratio']:.2f} | 2.00 |")


if __name__ == "__main__":
    main()
