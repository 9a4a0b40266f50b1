"""Published speedups of asynchronous systems, and those that the simulator predicts.

    python benchmarks/published.py

Every row has the model, GPUs, batch, cap of lengths and staleness bound that were published. All
rows share the rest, and nothing is tuned per row:

- Costs of a 7B model on one GPU: a decode step takes 8 ms plus 0.125 ms per sequence, training
  reaches 6,000 tokens/s, prefill takes 35 µs per token. All grow with the size of the model and
  are the same for all GPUs. A weight sync stops an engine for 2 s, and a shared pool needs 20 s to
  switch.
- ROLL Flash's batch of 256 is taken as prompts, with 16 completions each as elsewhere.
- Lengths are lognormal up to the cap, with the median and sigma of the nearest entry of LENGTHS,
  and prompts have 300 tokens.
- The baseline is synchronous and shares all GPUs between generation and training. An engine has
  256 slots, as vLLM has by default. Pools are divided as published, and in the fastest way in
  eighths of the GPUs.
- Systems that recompute the KV cache after a weight sync interrupt. Laminar's engines finish a
  completion with its version, but do not wait for each other, which no mode here does: its rows
  are the two nearest ones, swap and drain.
- An eighth of the GPUs and of the batch is simulated: as many completions per GPU take as long.
"""

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.report import RESULTS, command_line, origin, write
from paceline.schedule import ScheduleSettings
from paceline.simulator.costs import CostModel
from paceline.simulator.lengths import read_distribution
from paceline.simulator.simulation import Scenario, simulate
from paceline.types import OnSync

SCALE = 8
STEPS = 8  # measured, after those in which the pipeline fills
GROUP_SIZE = 16
LENGTHS = {8192: (2500, 0.8), 16384: (4000, 0.9), 32768: (5000, 1.1)}  # cap: median, sigma


@dataclass(frozen=True, slots=True)
class Row:
    system: str
    source: str
    billions: float  # parameters
    gpus: int
    completions: int  # per step
    cap: int  # tokens of a completion
    max_staleness: int
    on_sync: OnSync
    published: str  # speedup over the synchronous baseline
    rollout_eighths: int | None = None  # GPUs that generate, if published
    sigma: float | None = None  # of the lengths, if published


ROWS = (
    Row("AReaL", "arXiv 2505.24298", 1.5, 128, 8192, 32768, 8, OnSync.INTERRUPT, "2.77", 6),
    Row("AReaL", "arXiv 2505.24298", 7, 192, 8192, 32768, 8, OnSync.INTERRUPT, "2.27", 6),
    Row("verl", "fully async recipe", 7, 32, 8192, 28672, 1, OnSync.INTERRUPT, "2.66", 4),
    Row("verl", "fully async recipe", 7, 64, 8192, 28672, 1, OnSync.INTERRUPT, "1.92", 4),
    Row("verl", "fully async recipe", 7, 128, 8192, 28672, 1, OnSync.INTERRUPT, "2.35–2.67", 4),
    Row("ROLL Flash", "arXiv 2510.11345", 8, 128, 4096, 32768, 2, OnSync.INTERRUPT, "up to 2.24"),
    # The 99th percentile is 10 times the median: sigma = ln(10) / 2.326.
    *(
        Row(
            f"Laminar, {on_sync}", "arXiv 2510.12633", 7, 1024, 8192, 16384, 4, on_sync,
            "2.56 mean, 5.48 max", sigma=0.99,
        )
        for on_sync in (OnSync.SWAP, OnSync.DRAIN)
    ),
)  # fmt: skip


def costs(billions: float) -> CostModel:
    size = billions / 7
    return CostModel(
        decode_step_s=8e-3 * size,
        decode_sequence_s=0.125e-3 * size,
        decode_context_s=0.0,
        prefill_token_s=35e-6 * size,
        train_step_s=0.0,
        train_token_s=size / 6000,
        load_s=2.0,
        switch_s=10.0,  # twice per step
    )


def scenario(row: Row) -> Scenario:
    """Return the synchronous baseline."""
    median, sigma = LENGTHS[min(LENGTHS, key=lambda cap: abs(cap - row.cap))]
    lengths = read_distribution(f"lognormal:{median},{row.sigma or sigma}")
    devices = row.gpus // SCALE
    return Scenario(
        costs(row.billions),
        lengths.tokens(row.cap),
        ScheduleSettings(),
        prompt_tokens=300,
        steps=1 + STEPS,
        groups_per_step=row.completions // GROUP_SIZE // SCALE,
        group_size=GROUP_SIZE,
        engines=devices,
        train_devices=devices,
        shared=True,
        slots=256,
    )


def predict(row: Row) -> dict[int, float]:
    """Return the predicted speedup by the eighths of the GPUs that generate."""
    sync = scenario(row)
    baseline, devices = simulate(sync).steps_per_s, row.gpus // SCALE
    schedule = ScheduleSettings(max_staleness=row.max_staleness, on_sync=row.on_sync)
    found = {}
    for eighths in range(1, 8):
        if devices * eighths % 8 == 0:
            separate = replace(
                sync,
                schedule=schedule,
                shared=False,
                engines=devices * eighths // 8,
                train_devices=devices - devices * eighths // 8,
                steps=2 * row.max_staleness + 2 + STEPS,
            )
            found[eighths] = simulate(separate).steps_per_s / baseline
    return found


def main() -> None:
    command_line(__doc__).parse_args()
    table = Table(box=None, padding=(0, 2, 0, 0))
    columns = ("system", "model", "GPUs", "completions", "cap", "stale ≤", "published")
    for column in (*columns, "predicted, published split", "predicted, best split"):
        table.add_column(column)
    results = []
    for row in ROWS:
        found = predict(row)
        best = max(found, key=lambda eighths: found[eighths])
        given = row.rollout_eighths
        as_published = f"{found[given]:.2f} ({given}:{8 - given})" if given else ""
        results.append(asdict(row) | {"predicted": {n: round(r, 2) for n, r in found.items()}})
        numbers = (row.gpus, row.completions, row.cap, row.max_staleness, row.published)
        ratios = (as_published, f"{found[best]:.2f} ({best}:{8 - best})")
        table.add_row(row.system, f"{row.billions:g}B", *map(str, numbers), *ratios)
    Console(width=110).print(table)
    write(RESULTS / "published.json", origin() | {"rows": results})


if __name__ == "__main__":
    main()
