"""Steps of real loads on one GPU: hybrid sync against fully async, with the limit beside each.

    python benchmarks/gpu_real.py --smollm FOLDER --gsm8k train.jsonl [--steps 24] [--rounds 1]

Four loads: SmolLM2-135M on GSM8K and on arithmetic (short completions), and a 0.5B model with
random weights and completions of 512 tokens or with a long tail. Every load runs in both modes, one
after the other, with the settings a user would write. The figure is the median time of a step after
the first ones.
"""

import argparse
import asyncio
import itertools
import json
import logging
import platform
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import paceline.run  # noqa: E402
from benchmarks import gpu_loop  # noqa: E402
from paceline import generation  # noqa: E402
from paceline.config import load_config  # noqa: E402
from paceline.reward import verify  # noqa: E402
from paceline.rollout.client import EngineClient  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "gpu_real.json"
WARM_UP = 4
MODES = {
    "hybrid": ["schedule.max_staleness=0"],
    "turns": ["schedule.max_staleness=1", "schedule.on_sync=swap"],
    "turns2": ["schedule.max_staleness=2", "schedule.on_sync=swap"],
    "overlap": [
        "schedule.max_staleness=2",
        "schedule.on_sync=swap",
        "placement.overlap=true",
    ],
}
Metrics = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    model: str  # "smollm" or "0.5b"
    settings: list[str]
    target: float  # fully async / hybrid
    long_tail: bool | None = None  # None: completions end by themselves


FAST = ["train.dtype=bfloat16", "train.micro_batch_tokens=32768"]
LOADS = {
    "smollm gsm8k": Load(
        "smollm",
        [
            *FAST,
            "groups_per_step=64",
            "group_size=16",
            "data.prompt_key=question",
            "data.on_bad_row=skip",
            "data.max_prompt_length=300",
            "reward.function=last_number",
            "rollout.max_response_length=256",
            "rollout.slots=1024",
        ],
        1.0,
    ),
    "smollm arithmetic": Load(
        "smollm",
        [
            *FAST,
            "groups_per_step=64",
            "group_size=8",
            "data.max_prompt_length=100",
            "reward.function=last_number",
            "rollout.max_response_length=32",
            "rollout.slots=512",
        ],
        1.0,
    ),
    "0.5b 512": Load(
        "0.5b",
        [*gpu_loop.COMMON, "rollout.max_response_length=512", "rollout.slots=512"],
        1.25,
        False,
    ),
    "0.5b long tail": Load(
        "0.5b",
        [*gpu_loop.COMMON, "rollout.max_response_length=2048", "rollout.slots=256"],
        1.6,
        True,
    ),
}


def arithmetic(path: Path) -> str:
    """Write sums that a small chat model answers in a few tokens."""
    numbers = random.Random(0)
    with path.open("w") as file:
        for _ in range(8192):
            a, b = numbers.randint(2, 99), numbers.randint(2, 99)
            row = {"prompt": f"What is {a} + {b}? Answer with the number.", "answer": str(a + b)}
            file.write(json.dumps(row) + "\n")
    return str(path)


def measure(load: Load, mode: str, run_dir: Path, given: list[str], steps: int) -> Metrics:
    config = load_config(
        None,
        [
            *load.settings,
            *MODES[mode],
            f"steps={steps}",
            f"run_dir={run_dir}",
            "save_every=0",
            *given,
        ],
    )
    client = EngineClient
    if load.long_tail is not None:
        client = gpu_loop.forcing_client(load.long_tail, config.rollout.max_response_length)
    begun = time.time()
    with mock.patch.object(generation, "EngineClient", client):
        asyncio.run(paceline.run.train(config))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = [b["wall_time_s"] - a["wall_time_s"] for a, b in itertools.pairwise(rows)]
    times, steady = times[WARM_UP - 1 :], rows[WARM_UP:]
    median = statistics.median(times)
    return {
        "mode": mode,
        "start_s": round(rows[0]["wall_time_s"] - begun, 1),  # until the first step is done
        "step_s": round(median, 3),
        "mean_s": round(statistics.mean(times), 3),
        "slowest": round(max(times) / median, 2),
        "tokens": round(statistics.mean(row["rollout/tokens"] for row in steady)),
        **{
            name: round(statistics.median(row[f"time/{name}_s"] for row in steady), 4)
            for name in ("wait", "train", "sync")
        },
        "staleness": max(row["staleness/max"] for row in steady),
        "reward": round(statistics.mean(row["reward/mean"] for row in steady[-5:]), 3),
        "seconds": [round(t, 3) for t in times],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smollm", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--gsm8k", type=Path, help="train.jsonl of GSM8K")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--modes", default="hybrid,turns")
    parser.add_argument("--small", action="store_true", help="tiny model, to try it on a CPU")
    parser.add_argument("--set", action="append", default=[], help="additional key=value")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.getLogger("paceline").setLevel(logging.ERROR)
    verify.IN_PROCESS["varied"] = gpu_loop.varied
    paceline.run.save_checkpoint = gpu_loop.no_checkpoint  # type: ignore[assignment]
    results: Metrics = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "command": "python " + " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        random_model = gpu_loop.make_model(folder / "model", options.small)
        data = {
            "smollm gsm8k": str(options.gsm8k),
            "smollm arithmetic": arithmetic(folder / "arithmetic.jsonl"),
        }
        prompts = gpu_loop.make_prompts(folder / "prompts.jsonl")
        for number, name in itertools.product(range(options.rounds), options.loads.split(",")):
            load = LOADS[name]
            model = options.smollm if load.model == "smollm" else random_model
            given = [f"model={model}", f"data.path={data.get(name, prompts)}", *options.set]
            for mode in options.modes.split(","):
                run_dir = folder / f"{number}-{name}-{mode}".replace(" ", "-")
                run = {"load": name, "target": load.target} | measure(
                    load, mode, run_dir, given, options.steps
                )
                results["runs"].append(run)
                print(json.dumps(run), flush=True)
                options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
