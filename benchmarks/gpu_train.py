"""Training speed on one GPU, and its fraction of the matmul rate.

    python benchmarks/gpu_train.py [--quick] [--profile] [--out benchmarks/results/gpu_train.json]

Measures updates (forward, backward, clipping, AdamW) over packed sequences of 128-token prompts and
512-token completions, with random weights in the shapes of Qwen2.5-0.5B and 1.5B.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_load import (  # noqa: E402
    PROMPT,
    VOCABULARY,
    bandwidth,
    make_model,
    matmul_rate,
)
from benchmarks.report import RESULTS, command_line, gpu_circumstances, write  # noqa: E402
from paceline.algo.loss import PolicyLoss  # noqa: E402
from paceline.algo.settings import AlgorithmSettings  # noqa: E402
from paceline.training.engine import TrainEngine  # noqa: E402
from paceline.training.settings import TrainSettings  # noqa: E402
from paceline.training.single import SingleDevice  # noqa: E402
from paceline.types import Batch  # noqa: E402

COMPLETION = 512
TARGET_FRACTION = 0.45


def make_batch(rows: int, group: int) -> Batch:
    """Return a batch in which every `group` rows have the same prompt."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, VOCABULARY, (-(-rows // group), PROMPT))
    tokens = np.concatenate(
        [
            np.concatenate((prompts[i // group], rng.integers(0, VOCABULARY, COMPLETION)))
            for i in range(rows)
        ]
    )
    mask = np.tile(np.arange(PROMPT + COMPLETION) >= PROMPT, rows)
    return Batch(
        tokens=tokens.astype(np.int32),
        lengths=np.full(rows, PROMPT + COMPLETION, np.int32),
        mask=mask,
        logprobs=np.where(mask, -12.0, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        rewards=np.zeros(rows, np.float32),
        groups=(np.arange(rows) // group).astype(np.int32),
        advantages=np.where(mask, rng.standard_normal(len(mask)), 0).astype(np.float32),
    )


def update(engine: TrainEngine, batch: Batch) -> tuple[float, float]:
    """Return the seconds of the forward and backward pass, and of the optimizer step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.forward_backward(batch, PolicyLoss(AlgorithmSettings()))
    torch.cuda.synchronize()
    middle = time.perf_counter()
    engine.optimizer_step(1e-6)
    torch.cuda.synchronize()
    return middle - start, time.perf_counter() - middle


def measure(
    shape: str,
    rate: float,
    rows: int,
    micro: int,
    group: int = 1,
    checkpointing: bool = False,
    rounds: int = 5,
) -> dict[str, Any]:
    model = make_model(shape, torch.float32)
    engine = SingleDevice(
        model,
        TrainSettings(
            dtype="bfloat16", micro_batch_tokens=micro, gradient_checkpointing=checkpointing
        ),
    )
    batch = make_batch(rows, group)
    update(engine, batch)
    torch.cuda.reset_peak_memory_stats()
    times = [update(engine, batch) for _ in range(rounds)]
    seconds = statistics.median(sum(pair) for pair in times)
    size = sum(p.numel() for p in model.parameters())
    limit = rate / (6 * size)
    per_s = batch.num_tokens / seconds
    return {
        "shape": shape,
        "parameters": size,
        "rows": rows,
        "rows_per_prompt": group,
        "micro_batch_tokens": micro,
        "checkpointing": checkpointing,
        "tokens_per_s": round(per_s),
        "limit_tokens_per_s": round(limit),
        "fraction_of_matmul_rate": round(per_s / limit, 3),
        "target_fraction": TARGET_FRACTION if group == 1 and not checkpointing else None,
        "optimizer_ms": round(1e3 * statistics.median(pair[1] for pair in times), 1),
        "seconds": [round(sum(pair), 3) for pair in times],
        "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


def profile(shape: str, micro: int) -> dict[str, Any]:
    """Return the milliseconds and calls of each kernel in one micro-batch."""
    engine = SingleDevice(
        make_model(shape, torch.float32), TrainSettings(dtype="bfloat16", micro_batch_tokens=micro)
    )
    batch = make_batch(micro // (PROMPT + COMPLETION), 1)
    for _ in range(2):
        update(engine, batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        seconds = sum(update(engine, batch))
    events = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)
    table = {
        event.key[:110]: [round(event.self_device_time_total / 1e3, 2), event.count]
        for event in events
        if event.self_device_time_total > 2e3 * seconds  # 0.2 %
    }
    busy = sum(event.self_device_time_total for event in events) / 1e3
    return {
        "shape": shape,
        "tokens": batch.num_tokens,
        "ms": round(1e3 * seconds, 1),
        "kernels_ms": round(busy, 1),
        "ms_and_calls": table,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="only the 0.5B shape")
    parser.add_argument("--profile", action="store_true", help="only profile by kernel")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_train.json")
    options = parser.parse_args()
    results = gpu_circumstances() | {
        "triton": triton.__version__,
        "bandwidth_TB_s": round(bandwidth() / 1e12, 2),
        "matmul_TFLOP_s": round((rate := matmul_rate()) / 1e12),
        "load": f"{PROMPT}-token prompts, {COMPLETION}-token completions, bfloat16 matmuls, "
        "float32 weights and AdamW; whole updates, medians",
        "limit": "6 x parameters x tokens at the matmul rate; tokens of prompts and completions",
    }
    torch.cuda.empty_cache()

    def record(name: str, work: Callable[[], Any]) -> None:
        results[name] = work()
        print(name, json.dumps(results[name]), flush=True)
        torch.cuda.empty_cache()
        write(options.out, results)

    if not options.profile:
        record("packed", lambda: measure("0.5B", rate, 256, 32768))
        record("small_micro_batches", lambda: measure("0.5B", rate, 256, 8192, rounds=3))
        record("eight_completions_per_prompt", lambda: measure("0.5B", rate, 256, 32768, group=8))
        record(
            "checkpointing", lambda: measure("0.5B", rate, 256, 32768, checkpointing=True, rounds=3)
        )
        if not options.quick:
            record("1.5B", lambda: measure("1.5B", rate, 128, 16384, rounds=3))
    record("profile", lambda: profile("0.5B", 32768))


if __name__ == "__main__":
    main()
