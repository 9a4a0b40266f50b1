"""Decode speed of the native engine on one GPU, its limits, and the accuracy of its log-probs.

    python benchmarks/gpu_engine.py [--quick] [--profile] [--out benchmarks/results/gpu_engine.json]
    python benchmarks/gpu_engine.py --fp8 [--quick]     # writes gpu_engine_fp8.json

Random weights in the shapes of Qwen2.5-0.5B and 1.5B, 128-token prompts, 512 new tokens, log-probs
on. The limits are those of memory bandwidth and the matmul rate.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from transformers import Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_load import (  # noqa: E402
    FP8_VARIANTS,
    PROMPT,
    bandwidth,
    generate,
    limit,
    make_model,
    make_requests,
    matmul_rate,
)
from benchmarks.report import RESULTS, command_line, gpu_circumstances, write  # noqa: E402
from paceline.model.fp8 import FP8  # noqa: E402
from paceline.model.fp8_weights import fp8_weights  # noqa: E402
from paceline.model.weights import DecoderWeights  # noqa: E402
from paceline.rollout.native.engine import NativeEngine  # noqa: E402

NEW, LONGEST = 512, 4096
SIGMA = np.log(8) / 2.3263  # lognormal whose 99th percentile is 8 times its median
TAIL_MEDIAN, TAIL_SLOTS, TAIL_PROMPTS = 400, 256, 512
# tokens/s of vLLM 0.24 with log-probs on, same GPU and load, measured 2026-11-15
VLLM = {"0.5B": {64: 11e3, 256: 20e3, 512: 24e3}, "1.5B": {256: 22e3}}
TARGETS = {"0.5B": {64: 35e3, 256: 100e3, 512: 150e3}, "1.5B": {256: 55e3}}


def throughput(
    shape: str, sizes: tuple[int, ...], rounds: int, ceilings: tuple[float, float]
) -> list[dict[str, Any]]:
    model = make_model(shape)
    weights = DecoderWeights.from_module(model, share=True)
    rows = []
    for n in sizes:
        engine = NativeEngine(model.config, weights, slots=n, max_length=PROMPT + NEW)
        generate(engine, make_requests([24] * n, 99))
        times = [generate(engine, make_requests([NEW] * n, round))[1] for round in range(rounds)]
        rate = n * NEW / statistics.median(times)
        steady = steady_rate(engine, n, NEW)
        vllm = VLLM[shape].get(n)
        rows.append(
            {
                "shape": shape,
                "sequences": n,
                "tokens_per_s": round(rate),
                "decode_only_tokens_per_s": round(steady),
                "limit_tokens_per_s": round(limit(shape, n, PROMPT + NEW / 2, *ceilings)),
                "target": TARGETS[shape].get(n),
                "vllm": vllm,
                "times_vllm": vllm and round(rate / vllm, 2),
                "seconds": [round(t, 3) for t in times],
            }
        )
        print(rows[-1], flush=True)
        engine.sleep()
    return rows


def fp8_engine(
    model: Qwen2ForCausalLM, variant: str, slots: int, share: bool = True
) -> NativeEngine:
    kv, quantized = FP8_VARIANTS[variant]
    weights = DecoderWeights.from_module(model, share=share)
    return NativeEngine(
        model.config,
        fp8_weights(weights) if quantized else weights,
        slots=slots,
        max_length=PROMPT + NEW,
        kv_memory_fraction=0.8,
        kv_dtype=FP8 if kv else None,
    )


def fp8_throughput(shape: str, sizes: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    model = make_model(shape)
    rows = []
    for n in sizes:
        for variant in FP8_VARIANTS:
            engine = fp8_engine(model, variant, n)
            generate(engine, make_requests([24] * n, 99))
            times = [generate(engine, make_requests([NEW] * n, r))[1] for r in range(rounds)]
            rows.append(
                {
                    "shape": shape,
                    "sequences": n,
                    "fp8": variant,
                    "tokens_per_s": round(n * NEW / statistics.median(times)),
                    "decode_only_tokens_per_s": round(steady_rate(engine, n, NEW)),
                    "kv_cache_bytes": engine.cache_bytes(),
                    "seconds": [round(t, 3) for t in times],
                }
            )
            print(rows[-1], flush=True)
            engine.sleep()
    return rows


def steady_rate(engine: NativeEngine, n: int, new: int) -> float:
    """Return tokens per second while all slots decode, without prefill."""
    engine.submit(make_requests([new] * n, 77))
    for _ in range(4):
        engine.step()
    engine.wait_idle()
    start, before = time.perf_counter(), engine.tokens_sampled
    while len(engine._slots.live) == n:
        engine.step()
    rate = (engine.tokens_sampled - before) / (time.perf_counter() - start)
    while engine.has_work:
        engine.step()
    return rate


def long_tail(shape: str, ceilings: tuple[float, float]) -> dict[str, Any]:
    """Compare long-tailed completions with 256 slots that are always full at the same mean context.

    A batch of 512 cannot end before its longest completion, which takes `longest_alone_s` on its
    own. Slots are always full only while prompts are waiting.
    """
    model = make_model(shape)
    random = np.random.default_rng(0)
    lengths = np.clip(
        random.lognormal(np.log(TAIL_MEDIAN), SIGMA, 4 * TAIL_PROMPTS), 1, LONGEST
    ).astype(int)
    engine = NativeEngine(
        model.config,
        DecoderWeights.from_module(model, share=True),
        slots=TAIL_SLOTS,
        max_length=PROMPT + LONGEST,
        kv_memory_fraction=0.8,
    )
    for size in (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256):  # captures the CUDA graphs
        generate(engine, make_requests([16] * size, 1000 + size))
    batch = lengths[:TAIL_PROMPTS]
    times = [generate(engine, make_requests(batch.tolist(), round))[1] for round in range(3)]
    rate = int(batch.sum()) / statistics.median(times)
    context = float(
        (lengths * (PROMPT + lengths / 2)).sum() / lengths.sum()
    )  # mean over all tokens
    steady = steady_rate(engine, TAIL_SLOTS, int(2 * (context - PROMPT)))
    alone = generate(engine, make_requests([int(batch.max())], 55))[1]
    stream, waiting = stream_rates(engine, lengths.tolist())
    return {
        "shape": shape,
        "slots": TAIL_SLOTS,
        "mean_context": round(context),
        "steady_tokens_per_s": round(steady),
        "limit_tokens_per_s": round(limit(shape, TAIL_SLOTS, context, *ceilings)),
        "512_prompts": {
            "tokens": int(batch.sum()),
            "longest": int(batch.max()),
            "tokens_per_s": round(rate),
            "fraction_of_steady": round(rate / steady, 3),
            "seconds": [round(t, 3) for t in times],
            "longest_alone_s": round(alone, 3),
            "seconds_at_steady_rate": round(int(batch.sum()) / steady, 3),
            "limit": tail_limit(shape, batch.tolist(), context, ceilings),
        },
        "2048_prompts": {
            "tokens": int(lengths.sum()),
            "tokens_per_s": round(stream),
            "fraction_of_steady": round(stream / steady, 3),
            "while_prompts_wait": round(waiting),
            "while_prompts_wait_fraction_of_steady": round(waiting / steady, 3),
        },
    }


def tail_limit(
    shape: str, lengths: list[int], context: float, ceilings: tuple[float, float]
) -> dict[str, float]:
    """Return the time of the batch if every step ran at `limit`.

    Also return the resulting rate as a fraction of a steady state at `limit`.
    """
    waiting, seconds = lengths[::-1], 0.0
    live: list[tuple[int, int]] = []  # tokens remaining, context
    while waiting or live:
        while waiting and len(live) < TAIL_SLOTS:
            live.append((waiting.pop(), PROMPT))
        n, steps = len(live), min(left for left, _ in live)
        seconds += (
            steps * n / limit(shape, n, sum(seen for _, seen in live) / n + steps / 2, *ceilings)
        )
        live = [(left - steps, seen + steps) for left, seen in live if left > steps]
    fraction = sum(lengths) / seconds / limit(shape, TAIL_SLOTS, context, *ceilings)
    return {"seconds": round(seconds, 3), "fraction_of_steady": round(fraction, 3)}


def stream_rates(engine: NativeEngine, lengths: list[int]) -> tuple[float, float]:
    """Return tokens per second over the whole batch, and until the last prompt has a slot."""
    torch.cuda.synchronize()
    start, before = time.perf_counter(), engine.tokens_sampled
    engine.submit(make_requests(lengths, 66))
    while engine.waiting:
        engine.step()
    waiting = (engine.tokens_sampled - before) / (time.perf_counter() - start)
    while engine.has_work:
        engine.step()
    return (engine.tokens_sampled - before) / (time.perf_counter() - start), waiting


@torch.inference_mode()
def accuracy(shape: str, dtype: torch.dtype, slots: int, variant: str = "auto") -> dict[str, Any]:
    """Compare log-probs with a float32 forward pass over the same tokens.

    Up to 16 sequences are decoded by separate kernels.
    """
    model = make_model(shape, dtype)
    engine = fp8_engine(model, variant, slots, share=False)
    requests = make_requests([NEW] * 32, 5)
    done, _ = generate(engine, requests)
    engine.sleep()
    exact, worst, total, count = model.float(), 0.0, 0.0, 0
    for request in requests:
        completion = done[request.id]
        ids = torch.tensor([[*request.prompt, *completion.tokens.tolist()]], device="cuda")
        logits = exact(ids).logits[0, PROMPT - 1 : -1].log_softmax(-1)
        error = (
            logits.gather(1, ids[0, PROMPT:, None])[:, 0]
            - torch.from_numpy(completion.logprobs).cuda()
        ).abs()
        worst, total, count = (
            max(worst, float(error.max())),
            total + float(error.sum()),
            count + len(error),
        )
    return {
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "fp8": variant,
        "slots": slots,
        "tokens": count,
        "mean_error": total / count,
        "worst_error": worst,
    }


def step_times(shape: str) -> dict[int, float]:
    """Return the milliseconds of a decode step by number of sequences."""
    model = make_model(shape)
    engine = NativeEngine(
        model.config,
        DecoderWeights.from_module(model, share=True),
        slots=512,
        max_length=PROMPT + NEW,
    )
    times = {}
    for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        generate(engine, make_requests([24] * n, 99))
        times[n] = round(1e3 * n / steady_rate(engine, n, 200), 3)
    return times


def load_weights(shape: str, quantized: bool = False) -> dict[str, float]:
    """Return the milliseconds to load a float32 model on the same GPU into a bfloat16 engine.

    `quantized`: into one with FP8 weights.
    """
    model = make_model(shape, torch.float32)
    weights = DecoderWeights.from_module(model, share=False, dtype=torch.bfloat16)
    weights = fp8_weights(weights) if quantized else weights
    engine = NativeEngine(model.config, weights, slots=8, max_length=PROMPT + NEW)
    times = []
    for version in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.load(dict(model.named_parameters()), version)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return {"milliseconds": round(statistics.median(times[1:]), 2)}


def memory_growth(admissions: int) -> dict[str, Any]:
    """Return how much memory grows over many short completions, after the first 10 %."""
    model = make_model("0.5B")
    engine = NativeEngine(
        model.config, DecoderWeights.from_module(model, share=True), slots=128, max_length=256
    )
    random = np.random.default_rng(1)
    generate(engine, make_requests(random.integers(1, 100, admissions // 10).tolist(), 1))
    before = torch.cuda.memory_reserved()
    generate(engine, make_requests(random.integers(1, 100, admissions).tolist(), 2))
    engine.wait_idle()  # drops kept contexts
    pages = engine._backend.pages  # type: ignore[attr-defined]
    return {
        "admissions": admissions,
        "growth_bytes": torch.cuda.memory_reserved() - before,
        "pages_held": len(pages._holders) - 1 - pages.free,
    }


def profile(shape: str, n: int) -> dict[str, Any]:
    """Return the microseconds and calls of each kernel per decode step."""
    model = make_model(shape)
    engine = NativeEngine(
        model.config,
        DecoderWeights.from_module(model, share=True),
        slots=n,
        max_length=PROMPT + NEW,
    )
    generate(engine, make_requests([24] * n, 99))
    engine.submit(make_requests([NEW] * n, 3))
    while engine.tokens_sampled < n * (NEW // 2):
        engine.step()
    engine.wait_idle()
    before = engine.tokens_sampled
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(4):
            engine.step()
        engine.wait_idle()
    steps = (engine.tokens_sampled - before) / n
    events = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)
    table = {
        event.key[:90]: [
            round(event.self_device_time_total / steps, 1),
            round(event.count / steps, 1),
        ]
        for event in events
        if event.self_device_time_total > 0.3 * steps
    }
    return {"shape": shape, "sequences": n, "steps": steps, "us_and_calls_per_step": table}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, only the 0.5B shape")
    parser.add_argument("--profile", action="store_true", help="only profile by kernel")
    parser.add_argument("--fp8", action="store_true", help="only compare FP8 with bfloat16")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    name = "gpu_engine_fp8.json" if options.fp8 else "gpu_engine.json"
    options.out = options.out or RESULTS / name
    ceilings = bandwidth(), matmul_rate()
    torch.cuda.empty_cache()
    results = gpu_circumstances() | {
        "triton": triton.__version__,
        "bandwidth_TB_s": round(ceilings[0] / 1e12, 2),
        "matmul_TFLOP_s": round(ceilings[1] / 1e12),
        "load": f"{PROMPT}-token prompts, {NEW} new tokens, log-probs on, bfloat16, "
        "random weights; medians, including prefill",
    }

    def record(name: str, work: Callable[[], Any]) -> None:
        start = time.perf_counter()
        results[name] = work()
        print(
            f"{name} ({time.perf_counter() - start:.0f} s):",
            json.dumps(results[name], indent=1),
            flush=True,
        )
        torch.cuda.empty_cache()
        write(options.out, results)

    if options.profile:
        record("profile", lambda: [profile("0.5B", 64), profile("0.5B", 512)])
        return
    rounds = 1 if options.quick else 3
    if options.fp8:
        shapes = ("0.5B",) if options.quick else ("0.5B", "1.5B")
        both = [(variant, slots) for variant in FP8_VARIANTS for slots in (16, 32)]
        for shape in shapes:
            record(shape, partial(fp8_throughput, shape, (64, 256, 1024), rounds))
            record(f"sync {shape}", partial(load_weights, shape, quantized=True))
        record("accuracy", lambda: [accuracy("0.5B", torch.bfloat16, n, v) for v, n in both])
        return
    record("0.5B", lambda: throughput("0.5B", (64, 256, 512), rounds, ceilings))
    types = ((torch.bfloat16, 32), (torch.bfloat16, 16), (torch.float32, 32))
    record("accuracy", lambda: [accuracy("0.5B", dtype, slots) for dtype, slots in types])
    record("long_tail", lambda: long_tail("0.5B", ceilings))
    if not options.quick:
        record("1.5B", lambda: throughput("1.5B", (256,), rounds, ceilings))
        record("memory", lambda: memory_growth(2000))
        record("sync", lambda: load_weights("0.5B"))
        record("step_ms", lambda: step_times("0.5B"))
    record("profile", lambda: [profile("0.5B", 1), profile("0.5B", 64), profile("0.5B", 512)])


if __name__ == "__main__":
    main()
