"""Steps of real loads on one GPU: hybrid sync against fully async, and the limit of each.

    python benchmarks/gpu_real.py --smollm FOLDER --gsm8k train.jsonl [--steps 24] [--loads A,B]

Four loads: SmolLM2-135M on GSM8K and on arithmetic (short completions), and a 0.5B model with
random weights and completions of 512 tokens or with a long tail. Every load runs in both modes,
first with automatic settings, then with settings chosen by hand. The figures are the median and the
mean time of a step after the first three. Modes are compared by their means, because long and short
steps of an async run can alternate.

The limit of a step is the time that its bytes and floating-point operations need at the measured
bandwidth and matmul rate: the sum of generation and training for hybrid sync, the longer of the two
for fully async. Every decode step reads all weights, and hybrid sync needs at least as many decode
steps as the longest completion has tokens.
"""

import asyncio
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import gpu_loop  # noqa: E402
from benchmarks.gpu_load import PROMPT, bandwidth, matmul_rate  # noqa: E402
from benchmarks.report import RESULTS, command_line, gpu_circumstances, read_metrics, write  # noqa: E402
from benchmarks.teach_tasks import sums  # noqa: E402
from paceline import generation  # noqa: E402
from paceline.config import RunConfig, load_config  # noqa: E402
from paceline.rollout.client import EngineClient  # noqa: E402
from paceline.run import train  # noqa: E402

WARM_UP = 3
MOST_SLOTS = 1024
MODES = {
    "hybrid": ["schedule.max_staleness=0"],
    "async": ["schedule.max_staleness=2", "schedule.on_sync=swap"],
}
Metrics = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    model: str  # "smollm" or "0.5b"
    settings: list[str]
    by_hand: list[str]
    target: float  # fully async / hybrid
    long_tail: bool | None = None  # None: completions end by themselves


RANDOM = [
    "groups_per_step=32",
    "group_size=8",
    f"data.max_prompt_length={PROMPT}",
    "data.chat=false",
    "reward.function=varied",
    "rollout.generation_timeout=600",
]
FAST = ["train.dtype=bfloat16", "train.micro_batch_tokens=32768"]
LOADS = {
    "smollm gsm8k": Load(
        "smollm",
        [
            "groups_per_step=64",
            "group_size=16",
            "data.prompt_key=question",
            "data.on_bad_row=skip",
            "data.max_prompt_length=300",
            "reward.function=last_number",
            "rollout.max_response_length=256",
        ],
        [*FAST, "rollout.slots=1024"],
        1.0,
    ),
    "smollm arithmetic": Load(
        "smollm",
        [
            "groups_per_step=64",
            "group_size=8",
            "data.max_prompt_length=100",
            "reward.function=last_number",
            "rollout.max_response_length=32",
        ],
        [*FAST, "rollout.slots=512", "placement.overlap=false"],
        1.0,
    ),
    "0.5b 512": Load(
        "0.5b",
        [*RANDOM, "rollout.max_response_length=512"],
        [*FAST, "rollout.slots=512"],
        1.25,
        False,
    ),
    "0.5b long tail": Load(
        "0.5b",
        [*RANDOM, "rollout.max_response_length=2048"],
        [*FAST, "rollout.slots=256"],
        1.6,
        True,
    ),
}


@dataclass(frozen=True, slots=True)
class Limit:
    """What a step needs at least, from the shape of the model and the rates of the GPU."""

    parameters: int
    kv_bytes: int  # of a token
    prompt: float  # mean tokens
    bytes_per_s: float
    flops_per_s: float

    def seconds(self, mode: str, config: RunConfig, tokens: float) -> float:
        """Return the limit of a step that generates this many tokens."""
        rows = config.groups_per_step * config.group_size
        steps = tokens / min(rows * (1 + config.schedule.max_staleness), MOST_SLOTS)
        if mode == "hybrid":
            steps = max(steps, config.rollout.max_response_length)
        context = tokens * (self.prompt + tokens / rows / 2)
        moved = 2 * self.parameters * steps + self.kv_bytes * context
        read = tokens + config.groups_per_step * self.prompt
        flops = 2 * self.parameters * read
        generate = max(moved / self.bytes_per_s, flops / self.flops_per_s)
        train = 3 * flops / self.flops_per_s
        return generate + train if mode == "hybrid" else max(generate, train)


def gpu_rates() -> tuple[float, float]:
    rates = bandwidth(), matmul_rate()
    torch.cuda.empty_cache()
    return rates


def limit_of(model: str, prompts: str, key: str, rates: tuple[float, float]) -> Limit:
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    size = config.hidden_size // config.num_attention_heads
    kv = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * size
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)[key] for line in Path(prompts).read_text().splitlines()[:256]]
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    return Limit(parameters, kv, statistics.mean(lengths), *rates)


def arithmetic(path: Path) -> str:
    """Write sums that a small chat model answers in a few tokens."""
    path.write_text("".join(json.dumps(row) + "\n" for row in sums(8192, 0, largest=99)))
    return str(path)


def measure(load: Load, mode: str, by_hand: bool, given: list[str], limit: Limit) -> Metrics:
    settings = [*load.settings, *MODES[mode], *(load.by_hand if by_hand else []), *given]
    if mode == "hybrid":  # which has no overlap
        settings = [s for s in settings if not s.startswith("placement.overlap")]
    config = load_config(None, [*settings, "save_every=0"])
    client = EngineClient
    if load.long_tail is not None:
        client = gpu_loop.fixed_lengths(load.long_tail, config.rollout.max_response_length)
    begun = time.time()
    with mock.patch.object(generation, "EngineClient", client):
        asyncio.run(train(config))
    rows = read_metrics(config.run_dir)
    times = [b["wall_time_s"] - a["wall_time_s"] for a, b in itertools.pairwise(rows)]
    times, steady = times[WARM_UP - 1 :], rows[WARM_UP:]
    median = statistics.median(times)
    tokens = statistics.mean(row["rollout/tokens"] for row in steady)
    return {
        "mode": mode,
        "settings": "by hand" if by_hand else "auto",
        "start_s": round(rows[0]["wall_time_s"] - begun, 1),  # until the first step is done
        "step_s": round(median, 3),
        "mean_s": round(statistics.mean(times), 3),
        "limit_s": round(limit.seconds(mode, config, tokens), 3),
        "slowest": round(max(times) / median, 2),
        "tokens": round(tokens),
        **{
            name: round(statistics.median(row[f"time/{name}_s"] for row in steady), 4)
            for name in ("wait", "train", "sync")
        },
        "staleness": max(row["staleness/max"] for row in steady),
        "reward": round(statistics.mean(row["reward/mean"] for row in steady[-5:]), 3),
        "seconds": [round(t, 3) for t in times],
        "slow_steps": [
            {key: round(value, 4) for key, value in row.items() if key.startswith("time/")}
            for row, seconds in zip(rows[WARM_UP:], times, strict=True)
            if seconds > 2 * median
        ],
    }


def show(runs: list[Metrics]) -> None:
    """Print the table: a line for each run, with its ratio to hybrid sync of the same settings."""
    print(
        "load | mode | settings | mean s | limit | hybrid / this | target | best / this | slowest"
    )
    found = {(run["load"], run["mode"], run["settings"]): run["mean_s"] for run in runs}
    for run in runs:
        load, mode, settings = run["load"], run["mode"], run["settings"]
        base = found.get((load, "hybrid", settings), math.nan)
        best = min(found.get((load, mode, s), math.inf) for s in ("auto", "by hand"))
        target = run["target"] if mode == "async" else "-"
        print(
            f"{load} | {mode} | {settings} | {run['mean_s']} | {run['limit_s']} | "
            f"{base / run['mean_s']:.2f} | {target} | {best / run['mean_s']:.2f} | {run['slowest']}"
        )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--smollm", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--gsm8k", type=Path, help="train.jsonl of GSM8K")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--settings", default="auto,by hand")
    parser.add_argument("--small", action="store_true", help="tiny model, to try it on a CPU")
    parser.add_argument("--set", action="append", default=[], help="additional key=value")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_real.json")
    options = parser.parse_args()
    gpu_loop.prepare_runs()
    rates = gpu_rates() if torch.cuda.is_available() else (1e10, 1e11)
    results: Metrics = gpu_circumstances() | {
        "bandwidth_TB_s": round(rates[0] / 1e12, 2),
        "matmul_TFLOP_s": round(rates[1] / 1e12),
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        names = options.loads.split(",")
        random_model = ""
        if any(LOADS[name].model != "smollm" for name in names):
            random_model = gpu_loop.make_model(folder / "model", options.small)
        data = {
            "smollm gsm8k": str(options.gsm8k),
            "smollm arithmetic": arithmetic(folder / "arithmetic.jsonl"),
        }
        prompts = gpu_loop.make_prompts(folder / "prompts.jsonl")
        for name in names:
            load = LOADS[name]
            model = options.smollm if load.model == "smollm" else random_model
            path = data.get(name, prompts)
            limit = limit_of(model, path, "question" if "gsm8k" in name else "prompt", rates)
            for settings, mode in itertools.product(
                options.settings.split(","), options.modes.split(",")
            ):
                given = [
                    f"model={model}",
                    f"data.path={path}",
                    f"steps={options.steps}",
                    f"run_dir={folder / f'{name}-{mode}-{settings}'.replace(' ', '-')}",
                    *options.set,
                ]
                run = {"load": name, "target": load.target} | measure(
                    load, mode, settings == "by hand", given, limit
                )
                results["runs"].append(run)
                print(json.dumps(run), flush=True)
                write(options.out, results)
    show(results["runs"])


if __name__ == "__main__":
    main()
