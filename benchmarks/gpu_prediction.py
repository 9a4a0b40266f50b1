"""Predicted against measured steps per second on one GPU: hybrid sync, turns and overlap.

    python benchmarks/gpu_prediction.py --loads "0.5b 512"
    python benchmarks/gpu_prediction.py --loads "smollm gsm8k" --smollm FOLDER --gsm8k train.jsonl

The loads are those of benchmarks/gpu_real.py, with automatic settings; the two with SmolLM2-135M
need its folder. Each load starts one probe, which also measures overlap, and one run per mode: less
than 4 minutes per load on an H200 (--steps 12). Its rows replace those of the same load in
benchmarks/results/gpu_prediction.json. Where completions end by themselves, the simulator gets the
lengths that the run of hybrid sync had. --small is a tiny model with few tokens, to try the script
on a CPU.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import gpu_loop  # noqa: E402
from benchmarks.gpu_real import LOADS, Load, arithmetic  # noqa: E402
from benchmarks.prediction import Row, add, compare, measure, predict, show  # noqa: E402
from benchmarks.report import RESULTS, command_line  # noqa: E402
from paceline import generation  # noqa: E402
from paceline.config import RunConfig, load_config  # noqa: E402
from paceline.inputs import load_inputs  # noqa: E402
from paceline.rollout.client import EngineClient  # noqa: E402
from paceline.simulator.lengths import Distribution, read_distribution  # noqa: E402
from paceline.simulator.probe import probe  # noqa: E402
from paceline.types import Role  # noqa: E402
from paceline.workers.layout import plan_that_fits  # noqa: E402

WARM_UP = 4  # steps, in which kernels are compiled and the pipeline fills
AHEAD = ["schedule.max_staleness=2", "schedule.on_sync=swap"]
MODES = {
    "hybrid": ["schedule.max_staleness=0"],
    "turns": [*AHEAD, "placement.overlap=false"],
    "overlap": [*AHEAD, "placement.overlap=true"],
}
SMALL = ["groups_per_step=4", "group_size=4", "rollout.max_response_length=32"]


def run(load: Load, name: str, given: list[str], scratch: Path) -> list[Row]:
    """Probe a load, then predict and measure every mode of it."""

    def configure(mode: str) -> RunConfig:
        place = f"run_dir={scratch / f'{name}-{mode}'.replace(' ', '-')}"
        return load_config(None, [*load.settings, *given, *MODES[mode], place, "save_every=0"])

    found, rows = asyncio.run(probe(configure("overlap"))), list[Row]()
    points = {"decode": found.decode, "prefill": found.prefill, "train": found.train}
    lengths: Distribution | None = None
    for mode in MODES:
        config = configure(mode)
        client = EngineClient
        if load.long_tail is not None:
            client = gpu_loop.fixed_lengths(load.long_tail, config.rollout.max_response_length)
        with mock.patch.object(generation, "EngineClient", client):
            measured = measure(config, WARM_UP)
        lengths = lengths or _lengths(load, config)
        predicted = predict(_planned(config), found, lengths)
        probed = {} if rows else {"costs": found.costs.model_dump(), "points": points}
        rows.append(compare(name, mode, predicted, measured) | probed)
        print(json.dumps({key: rows[-1][key] for key in ("load", "mode", "error")}), flush=True)
    return rows


def _planned(config: RunConfig) -> RunConfig:
    """Return the recipe with the automatic settings of a run, for example its slots."""
    roles = [Role.ACTOR, Role.ROLLOUT]
    return asyncio.run(plan_that_fits(config, load_inputs(config).model_path, roles)).config


def _lengths(load: Load, config: RunConfig) -> Distribution:
    if load.long_tail is None:
        return read_distribution(config.run_dir)
    if not load.long_tail:
        return read_distribution(f"fixed:{config.rollout.max_response_length}")
    ids = range(config.steps * config.groups_per_step)
    made = [gpu_loop.tail_length(f"{s}.{i}.0") for s in ids for i in range(config.group_size)]
    return Distribution("those of the run", made)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--loads", default="0.5b 512", help=f"of {', '.join(LOADS)}")
    parser.add_argument("--smollm", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--gsm8k", type=Path, help="train.jsonl of GSM8K")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="tiny model, no file written")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_prediction.json")
    options = parser.parse_args()
    gpu_loop.prepare_runs()
    with tempfile.TemporaryDirectory() as folder:
        scratch, rows = Path(folder), []
        for name in options.loads.split(","):
            load = LOADS[name]
            model = options.smollm
            if load.model != "smollm":
                model = gpu_loop.make_model(scratch / "model", options.small)
            path = gpu_loop.make_prompts(scratch / "prompts.jsonl")
            if load.model == "smollm":
                path = arithmetic(scratch / "arithmetic.jsonl")
                path = str(options.gsm8k) if "gsm8k" in name else path
            given = [f"model={model}", f"data.path={path}", f"steps={options.steps}"]
            given += SMALL if options.small else []
            rows += run(load, name, given, scratch)
            if not options.small:
                add(options.out, rows, torch.cuda.get_device_name())
    show(rows)


if __name__ == "__main__":
    main()
