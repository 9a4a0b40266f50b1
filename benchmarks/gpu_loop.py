"""GRPO steps on one GPU as a user runs them: generation, rewards, update, weight sync.

    python benchmarks/gpu_loop.py [--steps 10] [--out benchmarks/results/gpu_loop.json]

Compares concurrent generation and training (placement.overlap, staleness up to 2) with hybrid sync.
Qwen2.5-0.5B shape with random weights, 32 prompts x 8 completions per step, 128-token prompts.
Completions have 512 tokens each, or forced long-tailed lengths (lognormal, median 400, 99th
percentile 3200, at most 2048) that are the same in both modes.
"""

import asyncio
import itertools
import json
import logging
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import paceline.run  # noqa: E402
from benchmarks.forced_lengths import forced_length, forcing_client  # noqa: E402
from benchmarks.gpu_load import PROMPT, SHAPES, VOCABULARY  # noqa: E402
from benchmarks.report import RESULTS, command_line, gpu_circumstances, read_metrics, write  # noqa: E402
from paceline import generation  # noqa: E402
from paceline.config import load_config  # noqa: E402
from paceline.data.tiny import make_tokenizer  # noqa: E402
from paceline.reward import verify  # noqa: E402
from paceline.rollout.client import EngineClient  # noqa: E402

NEW, LONGEST = 512, 2048
MEDIAN, P99 = 400, 3200
SHAPE = SHAPES["0.5B"] | {"vocab_size": VOCABULARY}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
COMMON = [
    "groups_per_step=32",
    "group_size=8",
    f"data.max_prompt_length={PROMPT}",
    "data.chat=false",
    "reward.function=varied",
    "train.dtype=bfloat16",
    "train.micro_batch_tokens=32768",
    "save_every=0",
    "rollout.generation_timeout=600",
]
MODES = {
    "hybrid": ["rollout.slots=256"],
    "async": [
        "placement.overlap=true",
        "schedule.max_staleness=2",
        "schedule.on_sync=swap",
        "rollout.slots=512",
    ],
}
LOADS = {
    "512": f"rollout.max_response_length={NEW}",
    "long tail": f"rollout.max_response_length={LONGEST}",
}
CYCLE = 3  # steps with staleness 0, 1 and 2 alternate
TARGETS = {("hybrid", "512"): 2.9, ("async", "512"): 2.3}


def make_model(directory: Path, small: bool) -> str:
    tokenizer = make_tokenizer()
    shape: dict[str, Any] = SMALL | {"vocab_size": len(tokenizer)} if small else SHAPE
    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(**shape, tie_word_embeddings=True, max_position_embeddings=32768)
    ).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def make_prompts(path: Path) -> str:
    """Write prompts of PROMPT tokens: a start token and one token per letter."""
    letters = random.Random(0)
    rows = [
        {"prompt": "".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=PROMPT - 1))}
        for _ in range(4096)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tail_length(request_id: str) -> int:
    return forced_length(request_id, MEDIAN, P99, LONGEST)


def fixed_lengths(long_tail: bool, longest: int) -> type[EngineClient]:
    """Return an engine client whose completions have predetermined lengths."""
    return forcing_client(
        lambda request_id: min(longest, tail_length(request_id)) if long_tail else longest
    )


def varied(completion: str, row: Mapping[str, Any]) -> float:
    """Return a different reward for each completion.

    With equal rewards every gradient would be zero, and matmuls of zeros are faster.
    """
    return random.Random(f"{len(completion)} {completion[:40]}").random()


async def no_checkpoint(*_: Any) -> None:
    """Skip the checkpoint, because only the train step is measured."""


def prepare_runs() -> None:
    """Let all runs of this program have the reward `varied`, no checkpoints and no warnings."""
    # a random model learns nothing, which the run would report as a warning
    logging.getLogger("paceline").setLevel(logging.ERROR)
    verify.IN_PROCESS["varied"] = varied
    mock.patch.object(paceline.run, "save_checkpoint", no_checkpoint).start()


def measure(
    model: str, run_dir: Path, mode: str, load: str, steps: int, extra: list[str]
) -> dict[str, Any]:
    overrides = [
        f"model={model}",
        f"run_dir={run_dir}",
        f"steps={steps}",
        *COMMON,
        *MODES[mode],
        LOADS[load],
        *extra,
    ]
    config = load_config(None, overrides)
    client = fixed_lengths(load == "long tail", config.rollout.max_response_length)
    with mock.patch.object(generation, "EngineClient", client):
        asyncio.run(paceline.run.train(config))
    rows = read_metrics(run_dir)
    warm_up = max(1, steps // 3)
    times = [
        after["wall_time_s"] - before["wall_time_s"] for before, after in itertools.pairwise(rows)
    ][warm_up - 1 :]
    # with a staleness bound, long and short steps alternate: measure whole cycles
    times = times[len(times) % CYCLE :]
    steady = rows[-len(times) :]
    tokens = statistics.mean(row["rollout/tokens"] for row in steady)
    seconds = sum(times) / len(times)
    return {
        "mode": mode,
        "load": load,
        "step_s": round(seconds, 3),
        "target_s": TARGETS.get((mode, load)),
        "new_tokens_per_step": round(tokens),
        "tokens_per_s": round(tokens / seconds),
        "train_s": round(statistics.median(row["time/train_s"] for row in steady), 3),
        "wait_s": round(statistics.median(row["time/wait_s"] for row in steady), 3),
        "sync_ms": round(1e3 * statistics.median(row["time/sync_s"] for row in steady), 2),
        "sync_max_ms": round(1e3 * max(row["time/sync_s"] for row in steady), 2),
        "staleness_max": max(row["staleness/max"] for row in steady),
        "seconds": [round(t, 3) for t in times],
        "logprob_diff_mean": steady[-1].get("train/logprob_diff_mean"),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--small", action="store_true", help="tiny model, to try the program on a CPU"
    )
    parser.add_argument(
        "--set", action="append", default=[], help="additional setting of the runs, key=value"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_loop.json")
    options = parser.parse_args()
    prepare_runs()
    results: dict[str, Any] = gpu_circumstances() | {
        "load": "GRPO, 0.5B, 32 prompts x 8 completions, 128-token prompts, bfloat16 matmuls; "
        "mean of steady steps",
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model", options.small)
        given = [f"data.path={make_prompts(Path(scratch) / 'prompts.jsonl')}", *options.set]
        for load in LOADS:
            for mode in MODES:
                run = measure(
                    model, Path(scratch) / f"{mode}-{load}", mode, load, options.steps, given
                )
                results["runs"].append(run)
                print(json.dumps(run), flush=True)
    by = {(run["mode"], run["load"]): run["step_s"] for run in results["runs"]}
    results["async_times_hybrid"] = {
        load: round(by["hybrid", load] / by["async", load], 2) for load in LOADS
    }
    results["async_times_hybrid_target"] = {"long tail": 1.3}
    print(json.dumps(results["async_times_hybrid"]))
    write(options.out, results)


if __name__ == "__main__":
    main()
